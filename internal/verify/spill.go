package verify

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
)

const (
	// fanBits of a key's hash choose a part, at each level other ones.
	fanBits = 6
	fan     = 1 << fanBits
	// maxLevel bounds how often a part is parted again: what is left then has one hash.
	maxLevel = 8
)

// spill holds entries by the hash of their key, in memory as long as they are within
// limit, else in files that have no name and vanish with the process. One goroutine
// writes it; then its parts are read.
type spill struct {
	dir   string
	limit int64
	level int
	mem   int64
	disk  int64 // bytes written to files
	parts [fan]part
}

// part is the entries whose hash has the same bits.
type part struct {
	mem  []byte
	file *os.File
	size int64 // of the file
}

func (p *part) bytes() int64 { return p.size + int64(len(p.mem)) }

func newSpill(dir string, limit int64, level int) *spill {
	return &spill{dir: dir, limit: limit, level: level}
}

// add appends an entry. Its bytes are copied.
func (s *spill) add(hash uint64, entry []byte) error {
	p := &s.parts[hash>>(64-fanBits*(s.level+1))&(fan-1)]
	p.mem = binary.LittleEndian.AppendUint32(p.mem, uint32(len(entry)))
	p.mem = append(p.mem, entry...)
	s.mem += int64(len(entry)) + lengthSize
	if s.mem <= s.limit {
		return nil
	}
	for i := range s.parts {
		if err := s.write(&s.parts[i]); err != nil {
			return err
		}
	}
	s.mem = 0
	return nil
}

const lengthSize = 4

func (s *spill) write(p *part) error {
	if len(p.mem) == 0 {
		return nil
	}
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
	p.mem = p.mem[:0]
	return nil
}

// load gives all entries of a part, which stay there.
func (p *part) load() ([]byte, error) {
	if p.size == 0 {
		return p.mem, nil
	}
	all := make([]byte, p.size+int64(len(p.mem)))
	if _, err := p.file.ReadAt(all[:p.size], 0); err != nil {
		return nil, fmt.Errorf("read rows that were put aside: %w", err)
	}
	copy(all[p.size:], p.mem)
	return all, nil
}

// split gives the entries of a part to a spill of the next level.
func (p *part) split(to *spill, seed maphash.Seed) error {
	each := func(r io.Reader, size int64) error {
		var head [lengthSize]byte
		var entry []byte
		for at := int64(0); at < size; {
			if _, err := io.ReadFull(r, head[:]); err != nil {
				return fmt.Errorf("read rows that were put aside: %w", err)
			}
			n := int(binary.LittleEndian.Uint32(head[:]))
			if cap(entry) < n {
				entry = make([]byte, n)
			}
			entry = entry[:n]
			if _, err := io.ReadFull(r, entry); err != nil {
				return fmt.Errorf("read rows that were put aside: %w", err)
			}
			if err := to.add(maphash.Bytes(seed, entryKey(entry)), entry); err != nil {
				return err
			}
			at += lengthSize + int64(n)
		}
		return nil
	}
	if p.size > 0 {
		if err := each(bufio.NewReaderSize(io.NewSectionReader(p.file, 0, p.size), 256<<10), p.size); err != nil {
			return err
		}
	}
	return each(bytes.NewReader(p.mem), int64(len(p.mem)))
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
