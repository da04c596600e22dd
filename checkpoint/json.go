package checkpoint

import "unicode/utf8"

// appendString appends s as a JSON string. It exists because encoding/json
// allocates, and the position record is written in every Kafka transaction.
//
// Bytes that are not UTF-8 become U+FFFD, as encoding/json has it: JSON cannot
// hold them. Only a database or publication name in an SQL_ASCII database can
// have such bytes; two names are then never taken for equal by mistake, because
// the name read back differs from the real one and the start is refused.
func appendString(dst []byte, s string) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, size := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && size == 1 {
				dst = append(dst, s[start:i]...)
				dst = append(dst, "\uFFFD"...)
				start = i + size
			}
			i += size
			continue
		}
		if c >= ' ' && c != '"' && c != '\\' {
			i++
			continue
		}
		dst = append(dst, s[start:i]...)
		if c == '"' || c == '\\' {
			dst = append(dst, '\\', c)
		} else {
			dst = append(dst, '\\', 'u', '0', '0', lowerHex[c>>4], lowerHex[c&0xf])
		}
		i++
		start = i
	}
	dst = append(dst, s[start:]...)
	return append(dst, '"')
}

const lowerHex = "0123456789abcdef"
