package router

import "testing"

func TestTimesOfCloudEventsAreTimes(t *testing.T) {
	for text, want := range map[string]bool{
		"2026-12-01T05:54:20Z": true, "2026-12-01T05:54:20.5Z": true, "2024-02-29T23:59:59+05:30": true, "2026-12-01T00:00:00-23:59": true,
		"2026-13-01T00:00:00Z": false, "2026-00-01T00:00:00Z": false, "2026-02-29T00:00:00Z": false, "2026-04-31T00:00:00Z": false, "2026-12-00T00:00:00Z": false,
		"2026-12-01T24:00:00Z": false, "2026-12-01T00:60:00Z": false, "2026-12-01T00:00:60Z": false, "2026-12-01T00:00:00": false, "2026-12-01T00:00:00.Z": false,
		"2026-12-01T00:00:00+24:00": false, "2026-12-01T00:00:00+05:60": false, "2026-12-01T00:00:00+0530": false, "2026-12-01T00:00:00+ab:cd": false,
		"0044-03-15T00:00:00Z BC": false, "infinity": false, "": false,
	} {
		if got := isRFC3339([]byte(text)); got != want {
			t.Errorf("%q is a time: %v, want %v", text, got, want)
		}
	}
}

func TestSourcesOfCloudEventsAreURIReferences(t *testing.T) {
	for text, want := range map[string]string{
		"pay/2.1": "pay/2.1", "a b": "a%20b", "%zz": "%25zz", "%4": "%254", "%41": "%41", "é": "%C3%A9",
	} {
		if got := string(appendURI(nil, []byte(text))); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

func TestPlainTimesOfHeadersAreThoseOfValues(t *testing.T) {
	for text, want := range map[string]string{
		"2026-12-01 05:54:20.5+00": "2026-12-01T05:54:20.5Z", "0044-03-15 00:00:00+00 BC": "0044-03-15T00:00:00Z BC", "infinity": "infinity",
	} {
		if got := string(appendPlainTime(nil, []byte(text), formTimestamptz)); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
