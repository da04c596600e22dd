SET TIME ZONE 'UTC';
INSERT INTO nums VALUES (1,1,2,3,1.5,2.25,123.456,12.30,42,12300,12345678901234567890.12345678901234567890,'12.34',true,26,1,5),
 (2,-32768,-2147483648,-9223372036854775808,'NaN','NaN','NaN',-999.99,-1,-100,-0.000000000000000000001,'-0.01',false,4294967295,2,1),
 (3,32767,2147483647,9223372036854775807,'Infinity','-Infinity',1e30,0,0,0,repeat('9',200)::numeric,'92233720368547758.07',NULL,0,3,2147483647),
 (4,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,4,NULL),
 (5,0,0,0,1e-10,1e300,0.10,0.10,1,100,100.00,'0',true,1,5,1), (6,0,0,0,4,4,1000,1,1,100,1e-5,'1',true,1,6,1);
INSERT INTO texts VALUES (1,'ab','varchar','tab	quote" back\ nl
end','CiText','name','<a b="1">x</a>','{"b":1,  "a":1.10,"a":9007199254740993}','{"b":1,  "a":1.10, "n":9007199254740993}','11111111-2222-3333-4444-555555555555','ok','a=>1, b=>NULL','top.a.b','the fat cat'::tsvector,'a@b.c','xyz  ','z'),
 (2,'','','','','',NULL,'null','null','00000000-0000-0000-0000-000000000000','sad','','a','','','',''),
 (3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL),
 (4,'é😀','ü','emoji 😀 and  and  ','ß','n',NULL,'"str"','[1,2,{"x":[]}]','aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee','happy','"k k"=>"v\"v"','a.b','''x'':1A','','','a');
INSERT INTO bins VALUES (1,'\x00ff10','1','1010','10000000000000000001','101','1'),(2,'','0','0000','00000000000000000000','',''),(3,NULL,NULL,NULL,NULL,NULL,NULL),(4,'\xdeadbeef','1','0001','11111111111111111111','111111111111','10101010101010101');
INSERT INTO times VALUES (1,'2026-12-01','11:51:30.123456','11:51:30','11:51:30.123','11:51:30.123789+02','2026-12-01 05:54:20.123456','2026-12-01 05:54:20','2026-12-01 05:54:20.123','2026-12-01 05:54:20.123456+05:30','2026-12-01 05:54:20+00','2026-12-01 05:54:20.120+00','1 year 2 mons 3 days 04:05:06.789'),
 (2,'infinity','24:00:00','00:00:00','23:59:59.999','11:51:02Z','infinity','infinity','-infinity','infinity','-infinity','infinity','-1 year -2 days +03:04:05'),
 (3,'-infinity','00:00:00','00:00:00','00:00:00','00:00:00-12','-infinity',NULL,NULL,'-infinity',NULL,NULL,'00:00:00'),
 (4,'0044-03-15 BC','12:00:00',NULL,NULL,NULL,'0044-03-15 12:00:00 BC',NULL,NULL,'0044-03-15 12:00:00+00 BC',NULL,NULL,'178000000 years'),
 (5,'12345-01-01','12:00:00.5',NULL,NULL,NULL,'12345-01-01 00:00:00','1969-12-31 23:59:59','1969-12-31 23:59:59.999','12345-01-01 00:00:00+00','1969-12-31 23:59:59+00','1900-01-01 00:00:00.001+00','-00:00:00.000001'),
 (6,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL),(7,'1582-10-10','00:00:00.000001',NULL,NULL,NULL,'1582-10-10 00:00:00',NULL,NULL,'1582-10-10 00:00:00+00',NULL,NULL,'1 mon');
INSERT INTO nets VALUES (1,'192.168.1.5/24','10.0.0.0/8','08:00:2b:01:02:03','08:00:2b:01:02:03:04:05','0/16B3748','771'),(2,'::1','2001:db8::/32',NULL,NULL,NULL,NULL);
INSERT INTO geos VALUES (1,'(1.5,-2)','{1,2,3}','[(0,0),(1,1)]','(2,2),(0,0)','[(0,0),(1,1),(2,0)]','((0,0),(1,1),(2,0))','<(1,2),3>'),(2,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO ranges VALUES (1,'[1,5)','[1,10]','(0.5,1.5]','[2026-01-01 00:00,2026-01-02 00:00)','[2026-01-01 00:00+00,2026-01-02 00:00+00)','[2026-01-01,2026-02-01)','{[1,3),[5,7)}'),(2,'empty','(,)',NULL,NULL,NULL,NULL,'{}');
INSERT INTO arrays VALUES (1,'{1,NULL,3}','{9007199254740993}','{"a b","c\"d",NULL,"","null"}','{1.50,NULL}','{2026-12-01,infinity}','{2026-12-01 05:54:20.5}','{2026-12-01 05:54:20.5+00}','{11111111-2222-3333-4444-555555555555}',ARRAY['{"a":1}'::jsonb,'null'],'{t,f,NULL}','{1.5,NaN,Infinity}','{ok,sad}','{{1,2},{3,4}}',ARRAY['\x01'::bytea,NULL],'{ab,cd}'),
 (2,'{}','{}','{}','{}','{}','{}','{}','{}','{}','{}','{}','{}','{}','{}','{}'),(3,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO comps VALUES (1,ROW('Main "St", 1',5),ARRAY[ROW('x',1)::addr,NULL,ROW(NULL,2)::addr],DEFAULT,DEFAULT),(2,NULL,NULL,DEFAULT,DEFAULT);
INSERT INTO defs(id,a,t,c,n,nn,nnb,nnu) VALUES (1,NULL,NULL,NULL,NULL,'x',true,'11111111-2222-3333-4444-555555555555'),(2,1,'t','2026-01-01',2.5,'y',false,'11111111-2222-3333-4444-555555555555');
INSERT INTO nopk VALUES (1,'a'),(1,'a'); INSERT INTO nopk_full VALUES (1,'a'),(1,'a');
INSERT INTO comp_key VALUES (1,'x','2026-01-01','v'); INSERT INTO "Mixed Case" VALUES (1,'v','q','ü');
INSERT INTO idx_ident VALUES (1,'c1','v'); INSERT INTO full_ident VALUES (1,'v',1);
INSERT INTO toast_d SELECT 1, repeat('0123456789abcdef',200), decode(repeat('00ff',1500),'hex'), jsonb_build_object('k',repeat('y',3000)), ARRAY[repeat('z',3000)], 1; INSERT INTO toast_f SELECT * FROM toast_d;
INSERT INTO ddl VALUES (1,'a',1); INSERT INTO parted VALUES (1,1,'a'),(2,11,'b'); INSERT INTO other.t VALUES (1,'o');
