package checkpoint

import (
	"errors"
	"testing"
)

func TestRefusalNamesWhatRiskAndRemedy(t *testing.T) {
	cause := errors.New("cause")
	for _, tt := range []struct {
		refusal Refusal
		want    string
	}{
		{Refusal{What: "a", Risk: "b", Remedy: "c", Err: cause}, "a: cause; at risk: b; to resolve: c"},
		{Refusal{What: "a", Remedy: "c"}, "a; to resolve: c"},
		{Refusal{What: "a"}, "a"},
	} {
		if got := tt.refusal.Error(); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
		if !errors.Is(&tt.refusal, tt.refusal.Err) && tt.refusal.Err != nil {
			t.Error("the cause is lost")
		}
	}
}
