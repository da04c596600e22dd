package config

import "strings"

// closest finds the choice that was most likely meant by s: one that differs
// in spelling only (case, _ for -), or by few enough letters. Where two are
// equally close it names none.
func closest(s string, choices []string) (string, bool) {
	plain := strings.ReplaceAll(strings.ToLower(s), "_", "-")
	best, bestAt, tie := 0, -1, false
	for i, c := range choices {
		if c == plain {
			return c, true
		}
		n := editDistance(plain, c)
		switch {
		case bestAt < 0 || n < best:
			best, bestAt, tie = n, i, false
		case n == best:
			tie = true
		}
	}
	// One letter in three: max-dely is max-delay, mode is not name.
	if bestAt < 0 || tie || best > max(1, len(plain)/3) {
		return "", false
	}
	return choices[bestAt], true
}

// editDistance counts the insertions, deletions and replacements that turn a
// into b (Levenshtein's, one row at a time).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
