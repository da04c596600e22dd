-- The shop. Orders and customers send their whole old row with an update
-- (REPLICA IDENTITY FULL), so that a consumer can show what changed without
-- keeping state; order_items show the default, the key alone.
CREATE TABLE customers (
  id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name  text NOT NULL,
  city  text NOT NULL,
  since timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE customers REPLICA IDENTITY FULL;

CREATE TABLE orders (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  customer_id bigint NOT NULL REFERENCES customers,
  status      text NOT NULL DEFAULT 'new',
  total       numeric(10,2) NOT NULL
);
ALTER TABLE orders REPLICA IDENTITY FULL;

CREATE TABLE order_items (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  order_id bigint NOT NULL REFERENCES orders,
  product  text NOT NULL,
  quantity int NOT NULL,
  price    numeric(10,2) NOT NULL
);

-- The outbox: an event is a row, written in the transaction of what it tells of.
CREATE TABLE outbox (
  id            bigserial PRIMARY KEY,
  event_id      uuid NOT NULL UNIQUE,
  aggregate_id  text NOT NULL,
  aggregate_seq bigint NOT NULL,
  event_type    text NOT NULL,
  payload       jsonb NOT NULL,
  created_at    timestamptz NOT NULL DEFAULT now(),
  published_at  timestamptz,
  UNIQUE (aggregate_id, aggregate_seq)
);

INSERT INTO customers (name, city) VALUES
  ('Ada', 'London'), ('Grace', 'New York'), ('Edsger', 'Rotterdam'), ('Barbara', 'Los Angeles'),
  ('Tony', 'Colombo'), ('Leslie', 'Brooklyn'), ('Frances', 'Peru'), ('Niklaus', 'Winterthur');
