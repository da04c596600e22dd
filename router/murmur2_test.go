package router

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

func TestPartitionIsTheJavaClients(t *testing.T) {
	// Utils.toPositive(Utils.murmur2(key)) % 6 of the Java client.
	for key, want := range map[string]int32{
		`{"id":1}`:                   0, // the hash is -56768732: by its absolute value it would be 2
		`{"id":2}`:                   4,
		`{"id":3}`:                   3,
		`{"id":4}`:                   2,
		`{"id":5}`:                   5,
		`{"id":6}`:                   1,
		`{"id":-1}`:                  1,
		`{"id":9223372036854775807}`: 1,
		"order-8891":                 5,
		"order-1":                    4,
		"order-2":                    3,
		"é":                          3,
	} {
		if got := Partition([]byte(key), 6); got != want {
			t.Errorf("Partition(%s, 6) = %d, want %d", key, got, want)
		}
	}
}

func TestMurmur2HasTheSignOfTheJavaClients(t *testing.T) {
	if got := int32(murmur2([]byte(`{"id":1}`))); got != -56768732 {
		t.Errorf(`murmur2({"id":1}) = %d, want -56768732`, got)
	}
}

func TestPartitionAllocatesNothing(t *testing.T) {
	key := []byte(`{"id":1234567}`)
	if n := testing.AllocsPerRun(100, func() { Partition(key, 6) }); n != 0 {
		t.Errorf("Partition allocates %v times", n)
	}
}

// The client library has its own murmur2; two independent ones that agree on
// everything that the fuzzer finds are unlikely to be wrong in the same way.
func FuzzPartitionAgreesWithTheClient(f *testing.F) {
	for _, key := range []string{"", "a", "ab", "abc", "abcd", "abcde", "\xff\xfe\xfd\xfc\xfb", `{"id":1}`} {
		f.Add([]byte(key), int32(6))
	}
	client := kgo.StickyKeyPartitioner(nil).ForTopic("t")
	f.Fuzz(func(t *testing.T, key []byte, n int32) {
		if key == nil || n <= 0 {
			return // without a key the client chooses as it likes
		}
		got, want := Partition(key, n), client.Partition(&kgo.Record{Key: key}, int(n))
		if int(got) != want {
			t.Errorf("Partition(%x, %d) = %d, the client says %d", key, n, got, want)
		}
	})
}

func BenchmarkPartition(b *testing.B) {
	key := []byte(`{"id":1234567}`)
	b.ReportAllocs()
	for b.Loop() {
		Partition(key, 6)
	}
}
