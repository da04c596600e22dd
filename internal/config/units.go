package config

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes.
type Size int64

// sizeUnits are tried in this order by String: the largest that divides wins.
// Binary units only there, because 8388608 is meant as 8MiB far more often
// than as anything in powers of ten.
func sizeUnits() []struct {
	name  string
	bytes int64
} {
	return []struct {
		name  string
		bytes int64
	}{
		{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
		{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"B", 1},
	}
}

// ParseSize reads a whole number of bytes (8388608) or of a unit: KiB MiB GiB
// TiB in powers of 1024, KB MB GB TB in powers of 1000. Case does not matter.
func ParseSize(s string) (Size, error) {
	num, unit := splitUnit(s)
	n, err := strconv.ParseInt(num, 10, 64)
	if err != nil {
		return 0, errors.New("is not a size")
	}
	if unit == "" {
		return Size(n), nil
	}
	for _, u := range sizeUnits() {
		if !strings.EqualFold(u.name, unit) {
			continue
		}
		if n > math.MaxInt64/u.bytes || n < math.MinInt64/u.bytes {
			return 0, errors.New("is too large a size")
		}
		return Size(n * u.bytes), nil
	}
	return 0, errors.New("is not a size: the unit is unknown")
}

// String is the form that ParseSize reads, with the largest binary unit that
// loses nothing.
func (s Size) String() string {
	for _, u := range sizeUnits()[:4] {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// MarshalText is String, so that encoders write what the file would hold.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// splitUnit separates "64 MiB" into its number and its unit.
func splitUnit(s string) (num, unit string) {
	s = strings.TrimSpace(s)
	i := len(s)
	for i > 0 && (s[i-1] < '0' || s[i-1] > '9') {
		i--
	}
	return s[:i], strings.TrimSpace(s[i:])
}

// Duration is a time.Duration that is also read and written in days.
type Duration time.Duration

// ParseDuration reads Go's form (10s, 500ms, 1h30m), with days in front where
// wanted (7d, 1d12h; a day is 24 hours). Only 0 needs no unit: a plain number
// would be seconds to one reader and milliseconds to the next.
func ParseDuration(s string) (Duration, error) {
	s = strings.TrimSpace(s)
	if s == "0" {
		return 0, nil
	}
	if regexp.MustCompile(`^[-+]?[0-9.]+$`).MatchString(s) {
		return 0, errors.New("is a duration without a unit")
	}
	rest, days := s, int64(0)
	if m := regexp.MustCompile(`^([0-9]+)d(.*)$`).FindStringSubmatch(s); m != nil {
		n, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil || n > math.MaxInt64/int64(day)-1 {
			return 0, errors.New("is too long a duration")
		}
		days, rest = n, m[2]
		if rest == "" {
			return Duration(n * int64(day)), nil
		}
	}
	d, err := time.ParseDuration(rest)
	if err != nil {
		return 0, errors.New("is not a duration")
	}
	if days > 0 && (d < 0 || d >= day) {
		return 0, errors.New("is not a duration: hours beside days must be below 24h")
	}
	return Duration(days*int64(day) + int64(d)), nil
}

const day = 24 * time.Hour

// Std is d as the standard library knows it.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String is the shortest form that ParseDuration reads back: 7d, 1m, 5ms.
func (d Duration) String() string {
	if d == 0 {
		return "0s"
	}
	std, prefix := time.Duration(d), ""
	if std >= day {
		prefix, std = fmt.Sprintf("%dd", std/day), std%day
		if std == 0 {
			return prefix
		}
	}
	s := std.String()
	// Go writes 1m0s and 1h0m0s; the zeros say nothing.
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return prefix + s
}

// MarshalText is String, so that encoders write what the file would hold.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }
