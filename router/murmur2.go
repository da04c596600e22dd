package router

import "encoding/binary"

// Partition returns the partition of key in a topic of n partitions as the Java client
// chooses it, so that other producers and consumers that join by key agree with ours.
// n must be positive. A nil key is hashed as an empty one; what is to become of records
// without a key is the caller's decision.
//
// The Java client clears the sign bit of the hash. That differs from the absolute
// value, which some clients take: half of all keys would be in another partition.
func Partition(key []byte, n int32) int32 {
	return int32(murmur2(key)&0x7fffffff) % n
}

// murmur2 is the 32-bit MurmurHash2 with the seed and the byte order of the Java client
// (org.apache.kafka.common.utils.Utils.murmur2).
func murmur2(data []byte) uint32 {
	const (
		seed = 0x9747b28c
		m    = 0x5bd1e995
		r    = 24
	)
	h := seed ^ uint32(len(data))
	for len(data) >= 4 {
		k := binary.LittleEndian.Uint32(data) * m
		k ^= k >> r
		h = h*m ^ k*m
		data = data[4:]
	}
	// The one to three bytes that remain count as little-endian, too.
	switch len(data) {
	case 3:
		h ^= uint32(data[2]) << 16
		fallthrough
	case 2:
		h ^= uint32(data[1]) << 8
		fallthrough
	case 1:
		h = (h ^ uint32(data[0])) * m
	}
	h ^= h >> 13
	h *= m
	return h ^ h>>15
}
