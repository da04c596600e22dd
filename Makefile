# Everything here works on a fresh machine with Go and git. What else a target can use, it says when it is missing.
# The same targets run in CI: see .ci/run.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

GO_MIN  := 1.26
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)

# Pinned, so that a lint run is the same everywhere and a new release of a linter breaks nobody's branch.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ERRORLINT   := github.com/polyfloyd/go-errorlint@v1.8.0
REVIVE      := github.com/mgechev/revive@v1.17.0

# A number of runs, not a time: at the end of a time Go 1.26 may report "context deadline exceeded" (go.dev/issue/75804).
FUZZTIME     ?= 100000x
TEST_TIMEOUT ?= 50m
TESTFLAGS    ?=

# Packages whose tests start real servers, and the others, found by what their tests import.
uses_servers = go list -f '{{.ImportPath}}{{range .TestImports}} {{.}}{{end}}{{range .XTestImports}} {{.}}{{end}}' ./... | awk '/ .*internal\/(harness|pgserver|kafkaserver)/ {print $$1} /internal\/(harness|pgserver|kafkaserver)( |$$)/ {print $$1}' | sort -u
no_servers   = comm -23 <(go list ./... | sort -u) <($(uses_servers))

.PHONY: help build demo test unit e2e real-kafka race fuzz bench lint vuln clean check-go

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

check-go:
	@command -v go >/dev/null || { echo "Go $(GO_MIN) or newer is needed: https://go.dev/dl/"; exit 1; }
	@v=$$(go env GOVERSION); v=$${v#go}; [ "$$(printf '%s\n' $(GO_MIN) "$$v" | sort -V | head -1)" = "$(GO_MIN)" ] || \
		{ echo "Go $(GO_MIN) or newer is needed, this is $$v: https://go.dev/dl/"; exit 1; }

build: check-go ## bin/walrelay, static
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/walrelay ./cmd/walrelay

demo: build ## build it and run the demo: a shop, PostgreSQL, Kafka and the connector, all throw-away
	./bin/walrelay demo

test: unit e2e real-kafka ## everything: unit, then real PostgreSQL with kfake, then real Kafka where there is Java

unit: check-go ## the tests that start no server
	go test $(TESTFLAGS) -timeout $(TEST_TIMEOUT) $$($(no_servers))

e2e: check-go ## the tests with real PostgreSQL (fetched once) and kfake; WALRELAY_TEST_PG=all for 14 to 18
	go test $(TESTFLAGS) -timeout $(TEST_TIMEOUT) $$($(uses_servers))

real-kafka: check-go ## the same tests against real Kafka brokers (fetched once; Java 17 and Maven)
	@if command -v java >/dev/null && { command -v mvn >/dev/null || [ -n "$$KAFKA_HOME" ]; }; then \
		set -x; WALRELAY_TEST_KAFKA=kafka go test $(TESTFLAGS) -timeout $(TEST_TIMEOUT) $$($(uses_servers)); \
	elif [ "$$WALRELAY_REQUIRE_REAL" = 1 ]; then \
		echo "real-kafka: Java 17 and Maven are required here: apt-get install openjdk-17-jre-headless maven"; exit 1; \
	else \
		echo "real-kafka: NOT RUN, it needs Java 17 and Maven: apt-get install openjdk-17-jre-headless maven"; \
	fi

race: check-go ## the tests that start no server, under the race detector (needs a C compiler)
	CGO_ENABLED=1 go test -race $(TESTFLAGS) -timeout $(TEST_TIMEOUT) $$($(no_servers))

fuzz: check-go ## every Fuzz function for FUZZTIME (100000x: so many runs)
	@{ git grep -oE '^func Fuzz[A-Za-z0-9_]*' -- '*_test.go' || echo "fuzz: there is no Fuzz function" >&2; } | while IFS=: read -r file func; do \
		echo "fuzz: $${func#func } in $$(dirname $$file)"; \
		go test -run '^$$' -fuzz "^$${func#func }$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x ./$$(dirname $$file) </dev/null; \
	done

bench: check-go ## measure throughput and latency
	go run ./internal/bench

lint: check-go ## gofmt, go vet, staticcheck, errorlint, revive
	@bad=$$(git ls-files -z --cached --others --exclude-standard '*.go' | xargs -0r gofmt -l); \
		[ -z "$$bad" ] || { echo "not formatted, run gofmt -w:"; echo "$$bad"; exit 1; }
	go vet ./...
	go run $(STATICCHECK) ./...
	go run $(ERRORLINT) ./...
	go run $(REVIVE) -config revive.toml -set_exit_status ./...

vuln: check-go ## known vulnerabilities in what the binary uses
	.ci/vuln

clean: ## remove what the targets above have built (the caches of servers stay)
	rm -rf bin dist
	go clean -testcache
