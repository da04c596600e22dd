package cdctest

import "testing"

func TestPartitionOfIsWhatTheJavaClientChooses(t *testing.T) {
	for _, c := range []struct {
		key  string
		n    int32
		want int32
	}{
		{`{"id":1}`, 6, 0}, {`{"id":2}`, 6, 4}, {`{"id":3}`, 6, 3}, {`{"id":4}`, 6, 2}, {`{"id":5}`, 6, 5},
		{`{"id":6}`, 6, 1}, {`{"id":-1}`, 6, 1}, {`{"id":9223372036854775807}`, 6, 1},
		{"order-8891", 6, 5}, {"order-1", 6, 4}, {"order-2", 6, 3}, {"é", 6, 3}, {"42", 6, 4},
		{"3fa85f64-5717-4562-b3fc-2c963f66afa6", 6, 1},
		{`{"id":1}`, 4, 0}, {`{"id":2}`, 4, 0}, {`{"id":-1}`, 4, 3},
		{`{"id":1}`, 8, 4}, {`{"id":2}`, 8, 0}, {`{"id":-1}`, 8, 3},
	} {
		if got := PartitionOf([]byte(c.key), c.n); got != c.want {
			t.Errorf("%s of %d: partition %d, want %d", c.key, c.n, got, c.want)
		}
	}
	if h := int32(murmur2([]byte(`{"id":1}`))); h != -56768732 {
		t.Errorf("murmur2 of {\"id\":1} is %d, want -56768732", h)
	}
}
