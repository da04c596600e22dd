package router

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/router/format"
)

// columns reads TABLE [exclude=A,B] [mask=A:sha256,B:hmac-sha256:SALT,C:truncate:N,D:null,E:fixed:TEXT]
// [gone=A] of source.columns.
func (s *routeScript) columns(w []word) error {
	if s.o.Columns == nil {
		s.o.Columns = map[string]ColumnOptions{}
	}
	o := ColumnOptions{Masks: map[string]format.Mask{}}
	for _, v := range w[1:] {
		key, value, _ := strings.Cut(v.text, "=")
		list := strings.Split(value, ",")
		switch key {
		case "exclude":
			o.Exclude = list
		case "gone":
			o.Gone = list
		case "mask":
			for _, m := range list {
				p := append(strings.Split(m, ":"), "")
				mask, err := scriptMask(p[1], p[2])
				if err != nil {
					return err
				}
				o.Masks[p[0]] = mask
			}
		default:
			return fmt.Errorf("no option of columns %s", key)
		}
	}
	s.o.Columns[w[0].text] = o
	return nil
}

func scriptMask(kind, value string) (m format.Mask, err error) {
	switch kind {
	case "sha256":
		m.Kind = format.MaskSHA256
	case "hmac-sha256":
		m.Kind, m.Salt = format.MaskHMAC, []byte(value)
	case "null":
		m.Kind = format.MaskNull
	case "fixed":
		m.Kind, m.Text = format.MaskFixed, value
	case "truncate":
		m.Kind = format.MaskTruncate
		m.Length, err = strconv.Atoi(value)
	default:
		err = fmt.Errorf("no mask %s", kind)
	}
	return m, err
}

// wideMasks hides columns of wideRow, by each mask.
func wideMasks() map[string]ColumnOptions {
	return map[string]ColumnOptions{"public.orders": {Exclude: []string{"data"}, Masks: map[string]format.Mask{
		"id": {Kind: format.MaskHMAC, Salt: []byte("pepper")}, "customer": {Kind: format.MaskSHA256}, "note": {Kind: format.MaskTruncate, Length: 8},
		"ref": {Kind: format.MaskNull}, "code": {Kind: format.MaskFixed, Text: "-"},
	}}}
}
