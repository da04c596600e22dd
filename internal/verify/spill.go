package verify

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

const (
	// fanBits of a key's hash choose a part, at each level other ones.
	fanBits = 6
	fan     = 1 << fanBits
	// maxLevel bounds how often a part is parted again: what is left then has one hash.
	maxLevel = 8
)

// spill holds entries by the hash of their key: each part up to its share of limit in
// memory, and the rest in files that have no name and vanish with the process. One
// goroutine writes it; then its parts are read.
type spill struct {
	dir   string
	share int64 // bytes of a part in memory
	level int
	disk  int64 // bytes written to files
	parts [fan]part
}

// part is the entries whose hash has the same bits.
type part struct {
	mem     []byte
	file    *os.File
	size    int64 // of the file
	entries int
}

func (p *part) bytes() int64 { return p.size + int64(len(p.mem)) }

func newSpill(dir string, limit int64, level int) *spill {
	return &spill{dir: dir, share: limit / fan, level: level}
}

// add appends an entry. Its bytes are copied.
func (s *spill) add(hash uint64, entry []byte) error {
	p := &s.parts[hash>>(64-fanBits*(s.level+1))&(fan-1)]
	need := len(entry) + binary.MaxVarintLen32
	if len(p.mem) > 0 && int64(len(p.mem)+need) > s.share {
		if err := s.write(p); err != nil {
			return err
		}
	}
	if len(p.mem)+need > cap(p.mem) {
		// Grown by hand: append would take more than the share.
		grown := make([]byte, len(p.mem), max(len(p.mem)+need, min(2*cap(p.mem), int(s.share))))
		copy(grown, p.mem)
		p.mem = grown
	}
	p.mem = appendBytes(p.mem, entry)
	p.entries++
	return nil
}

func (s *spill) write(p *part) error {
	if p.file == nil {
		f, err := os.CreateTemp(s.dir, "walrelay-verify-")
		if err != nil {
			return fmt.Errorf("put rows aside: %w; name a directory with room in --temp-dir", err)
		}
		p.file = f
		if err := os.Remove(f.Name()); err != nil {
			return fmt.Errorf("put rows aside: %w", err)
		}
	}
	n, err := p.file.Write(p.mem)
	p.size += int64(n)
	s.disk += int64(n)
	if err != nil {
		return fmt.Errorf("put rows aside: %w; name a directory with room in --temp-dir", err)
	}
	if p.mem = p.mem[:0]; int64(cap(p.mem)) > s.share {
		p.mem = nil // an entry of its own size
	}
	return nil
}

// empty tells whether nothing was added.
func (s *spill) empty() bool {
	for i := range s.parts {
		if s.parts[i].entries > 0 {
			return false
		}
	}
	return true
}

// load gives all entries of a part, which stay there; in buf, where it has the room and
// they are not in memory.
func (p *part) load(buf []byte) ([]byte, error) {
	if p.size == 0 {
		return p.mem, nil
	}
	n := int(p.bytes())
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := p.file.ReadAt(buf[:p.size], 0); err != nil {
		return nil, fmt.Errorf("read rows that were put aside: %w", err)
	}
	copy(buf[p.size:], p.mem)
	return buf, nil
}

// splitBuffer is how much of a file is read at once to be parted again.
const splitBuffer = 64 << 10

// split gives the entries of a part to a spill of the next level; hash is that of an
// entry's key.
func (p *part) split(to *spill, hash func(key []byte) uint64) error {
	both := io.Reader(bytes.NewReader(p.mem))
	if p.size > 0 {
		both = io.MultiReader(io.NewSectionReader(p.file, 0, p.size), both)
	}
	r := bufio.NewReaderSize(both, splitBuffer)
	var entry []byte
	for range p.entries {
		size, err := binary.ReadUvarint(r)
		if err != nil {
			return fmt.Errorf("read rows that were put aside: %w", err)
		}
		entry = slices.Grow(entry[:0], int(size))[:size]
		if _, err := io.ReadFull(r, entry); err != nil {
			return fmt.Errorf("read rows that were put aside: %w", err)
		}
		if err := to.add(hash(entryKey(entry)), entry); err != nil {
			return err
		}
	}
	return nil
}

// free gives a part's memory and file back.
func (p *part) free() error {
	file := p.file
	*p = part{}
	if file == nil {
		return nil
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("close a temporary file: %w", err)
	}
	return nil
}

func (s *spill) close() error {
	var errs []error
	for i := range s.parts {
		errs = append(errs, s.parts[i].free())
	}
	return errors.Join(errs...)
}
