package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const index = `walrelay

/status   what it is doing, as JSON
/metrics  Prometheus metrics
/healthz  200 while the process makes sense, else 503
/readyz   200 while it does its job, else 503
`

// newHandler lays the pages out. All of them only read, so only GET and HEAD
// are taken.
func newHandler(o Options) http.Handler {
	gatherer := o.Gatherer
	if gatherer == nil {
		gatherer = prometheus.NewRegistry()
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", guarded(o, promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{})))
	mux.Handle("GET /status", guarded(o, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeStatus(w, o) })))
	mux.Handle("GET /{$}", guarded(o, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, index) })))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeProbe(w, o, o.Healthy) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { writeProbe(w, o, o.Ready) })
	return mux
}

// guarded asks for the token where one is set.
func guarded(o Options, next http.Handler) http.Handler {
	if o.Token.IsZero() {
		return next
	}
	want := sha256.Sum256([]byte(o.Token.Reveal()))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		// Hashes have one length, so that the time tells nothing of the token's.
		got := sha256.Sum256([]byte(token))
		if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="walrelay"`)
			writeText(w, http.StatusUnauthorized, "send admin.token as \"Authorization: Bearer TOKEN\"\n")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// writeStatus encodes before it answers, so that a status without a JSON form
// is an error and not half a page.
func writeStatus(w http.ResponseWriter, o Options) {
	var status any = struct{}{}
	if o.Status != nil {
		status = o.Status()
	}
	body, err := json.MarshalIndent(status, "", "  ")
	if err != nil {
		o.Logger.Error().Err(err).Msg("status has no JSON form")
		writeText(w, http.StatusInternalServerError, "the status has no JSON form; the log says why\n")
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(append(body, '\n')) // a client that went away needs no answer
}

// writeProbe answers a probe. The reason is for those who may see the status
// page too: with a token set, probes are open to all and say no more than no.
func writeProbe(w http.ResponseWriter, o Options, probe func() error) {
	if probe == nil {
		writeText(w, http.StatusOK, "ok\n")
		return
	}
	switch err := probe(); {
	case err == nil:
		writeText(w, http.StatusOK, "ok\n")
	case o.Token.IsZero():
		writeText(w, http.StatusServiceUnavailable, fmt.Sprintf("not ok: %v\n", err))
	default:
		writeText(w, http.StatusServiceUnavailable, "not ok; /status says why\n")
	}
}

func writeText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text) // a client that went away needs no answer
}
