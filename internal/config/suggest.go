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

// editDistance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b (Levenshtein's, with Damerau's swap).
func editDistance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			n := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				n = min(n, rows[i-2][j-2]+1)
			}
			rows[i][j] = n
		}
	}
	return rows[len(a)][len(b)]
}
