package checkpoint

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// Tree is a partitioned table's partitions, by OID, as they were when last looked at: the
// leaves, and the tables between them and the root. What is attached, detached or
// truncated below the root is not in the stream, so that it is compared with this, over
// a restart too.
type Tree map[uint32]Part

// Part is a table below the root of a Tree.
type Part struct {
	Name string // schema.table, for people
	// Link is the transaction that attached it to its parent, 32 bits: one that is
	// detached and attached again has another.
	Link uint32
	// File is the number of the file that holds its rows, which a TRUNCATE replaces; 0 for
	// a table that is partitioned itself.
	File uint32
	// Space is the tablespace of the file; 0 for the database's.
	Space uint32
	// Truncated is the last transaction, 32 bits, whose truncate of the whole table the
	// stream has sent since File was looked at; 0 for none.
	Truncated uint32
}

// appendTrees appends trees as a JSON object, sorted by OID; null for one taken out. Up to
// 64 tables are sorted on the stack.
//
//	| field     | JSON            | meaning        |
//	| --------- | --------------- | -------------- |
//	| name      | text            | Part.Name      |
//	| link      | integer         | Part.Link      |
//	| file      | integer, absent | Part.File      |
//	| space     | integer, absent | Part.Space     |
//	| truncated | integer, absent | Part.Truncated |
func appendTrees(dst []byte, trees map[uint32]Tree) []byte {
	dst = append(dst, '{')
	var room, below [64]uint32
	roots := slices.AppendSeq(room[:0], maps.Keys(trees))
	slices.Sort(roots)
	for i, oid := range roots {
		dst = appendOID(dst, oid, i > 0)
		tree := trees[oid]
		if tree == nil {
			dst = append(dst, "null"...)
			continue
		}
		dst = append(dst, '{')
		parts := slices.AppendSeq(below[:0], maps.Keys(tree))
		slices.Sort(parts)
		for j, oid := range parts {
			dst = appendPart(appendOID(dst, oid, j > 0), tree[oid])
		}
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

// appendOID appends an OID as the name of a member.
func appendOID(dst []byte, oid uint32, comma bool) []byte {
	if comma {
		dst = append(dst, ',')
	}
	dst = append(dst, '"')
	dst = strconv.AppendUint(dst, uint64(oid), 10)
	return append(dst, `":`...)
}

func appendPart(dst []byte, p Part) []byte {
	dst = append(dst, `{"name":`...)
	dst = appendText(dst, p.Name)
	dst = append(dst, `,"link":`...)
	dst = strconv.AppendUint(dst, uint64(p.Link), 10)
	if p.File != 0 {
		dst = append(dst, `,"file":`...)
		dst = strconv.AppendUint(dst, uint64(p.File), 10)
	}
	if p.Space != 0 {
		dst = append(dst, `,"space":`...)
		dst = strconv.AppendUint(dst, uint64(p.Space), 10)
	}
	if p.Truncated != 0 {
		dst = append(dst, `,"truncated":`...)
		dst = strconv.AppendUint(dst, uint64(p.Truncated), 10)
	}
	return append(dst, '}')
}

type partRecord struct {
	Name      *jsonText `json:"name"`
	Link      *uint32   `json:"link"`
	File      uint32    `json:"file"`
	Space     uint32    `json:"space"`
	Truncated uint32    `json:"truncated"`
}

// treeRecords are trees by the OIDs of their roots, of parts by their OIDs.
type treeRecords map[string]map[string]*partRecord

// trees takes trees out of their JSON form; gone tells whether null, for one that was
// taken out, may stand there.
func (m treeRecords) trees(gone bool) (map[uint32]Tree, error) {
	if len(m) == 0 {
		return nil, nil
	}
	out := make(map[uint32]Tree, len(m))
	for name, parts := range m {
		root, err := parseOID(name)
		switch {
		case err != nil:
			return nil, err
		case parts == nil && !gone:
			return nil, fmt.Errorf("tree %s is null", quote(name))
		case parts == nil:
			out[root] = nil
			continue
		}
		tree := make(Tree, len(parts))
		for name, p := range parts {
			oid, err := parseOID(name)
			if err == nil && (p == nil || p.Name == nil || p.Link == nil) {
				err = errors.New(`"name" or "link" is missing`)
			}
			if err != nil {
				return nil, fmt.Errorf("partition %s: %w", quote(name), err)
			}
			tree[oid] = Part{Name: string(*p.Name), Link: *p.Link, File: p.File, Space: p.Space, Truncated: p.Truncated}
		}
		out[root] = tree
	}
	return out, nil
}

func parseOID(name string) (uint32, error) {
	oid, err := strconv.ParseUint(name, 10, 32)
	if err != nil || strconv.FormatUint(oid, 10) != name {
		return 0, fmt.Errorf("table %s is not an OID", quote(name))
	}
	return uint32(oid), nil
}

// treeLog is the part of a Log that holds the partitions. Trees are replaced and never
// altered, so that they are kept without being copied.
type treeLog struct {
	trees   map[uint32]Tree     // as committed
	changed map[uint32]struct{} // of them those that the state record has otherwise
	staged  map[uint32]Tree     // of the transaction under way
}

func newTreeLog(trees map[uint32]Tree) treeLog {
	l := treeLog{trees: maps.Clone(trees), changed: map[uint32]struct{}{}}
	if l.trees == nil {
		l.trees = map[uint32]Tree{}
	}
	return l
}

// stage takes the trees that a transaction changes, and fills into with what the state
// record has otherwise.
func (l *treeLog) stage(trees, into map[uint32]Tree) {
	l.staged = trees
	clear(into)
	for oid := range l.changed {
		into[oid] = l.trees[oid]
	}
	maps.Copy(into, trees)
}

// whole gives every tree as the transaction under way leaves it.
func (l *treeLog) whole() map[uint32]Tree {
	all := maps.Clone(l.trees)
	for oid, tree := range l.staged {
		setTree(all, oid, tree)
	}
	return all
}

func setTree(trees map[uint32]Tree, oid uint32, tree Tree) {
	if tree == nil {
		delete(trees, oid)
	} else {
		trees[oid] = tree
	}
}

// commit takes over what the transaction changed; state tells whether it wrote a state
// record, which then holds all of it.
func (l *treeLog) commit(state bool) {
	for oid, tree := range l.staged {
		setTree(l.trees, oid, tree)
		l.changed[oid] = struct{}{}
	}
	l.staged = nil
	if state {
		clear(l.changed)
	}
}
