package verify

import "container/heap"

// sample chooses the n keys with the smallest hashes, so that both sides choose the same
// ones. The zero n takes all.
type sample struct {
	n   int
	top hashes
}

// hashes is a heap with the largest on top.
type hashes []uint64

func (h hashes) Len() int           { return len(h) }
func (h hashes) Less(i, j int) bool { return h[i] > h[j] }
func (h hashes) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }

// Push is heap.Interface's.
func (h *hashes) Push(x any) { *h = append(*h, x.(uint64)) }

// Pop is heap.Interface's.
func (h *hashes) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// take tells whether a key may be among those chosen.
func (s *sample) take(hash uint64) bool {
	switch {
	case s.n <= 0:
		return true
	case len(s.top) < s.n:
		heap.Push(&s.top, hash)
	case hash > s.top[0]:
		return false
	case hash < s.top[0]:
		s.top[0] = hash
		heap.Fix(&s.top, 0)
	}
	return true
}

// threshold is the largest hash that is chosen, and tells whether others are left out.
func (s *sample) threshold() (hash uint64, sampled bool) {
	if s.n <= 0 || len(s.top) < s.n {
		return ^uint64(0), false
	}
	return s.top[0], true
}
