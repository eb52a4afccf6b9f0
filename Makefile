# `make` lists the targets. Go is all that is needed; lint builds its own tool.
LINT_VERSION := v2.15.0
# A linter refuses code for a newer Go than its own, so its place names both.
LINT = $(CURDIR)/.cache/golangci-lint-$(LINT_VERSION)-$(shell go env GOVERSION)/golangci-lint
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
OUTPUT ?= bin/virgate
FUZZTIME ?= 10s
SEED ?= 1
OPERATIONS ?= 10000
RACE ?= auto # or required
kubernetes = $(addprefix -X k8s.io/component-base/version.git,Version=v1.36.3 Major=1 Minor=36) # which its modules do not know
stripped = -ldflags "-s -w" # the tables for debuggers take nearly half of the time to link tests
race = $(shell go build -race runtime/cgo 2>/dev/null && echo -race)
export CGO_CFLAGS := -g -O2 -Wno-deprecated-declarations # go-nvml has all of NVML's header
export CGO_LDFLAGS := -g -O2 -Wl,-z,lazy # it leaves NVML's names to the loader; some compilers say -z now

.PHONY: help all demo build test test-race test-kubernetes e2e test-chart manifest reference test-prometheus image image-tar shell licences sbom gpu-bundle test-gpu fuzz vulnerabilities soak lint bench bench-check
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile

all: lint test test-race test-chart test-kubernetes e2e bench-check ## what CI runs

demo: ## the whole program on a simulated node, in one process
	go run ./cmd/virgate demo

build: ## bin/virgate, or OUTPUT, stripped and reproducible
	go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o $(OUTPUT) ./cmd/virgate

test: ## all tests but the long ones, in 2 min or so; needs Go alone
	go test -short -vet=off -p 4 $(stripped) ./... # lint vets; -p 4 because many tests wait

test-race: ## all tests, floods, leaks and a short soak too, with the race detector where there is a C compiler
	@[ '$(race)' ] || { echo 'race detector off: no C compiler, or CGO_ENABLED=0' >&2; [ '$(RACE)' != required ]; }
	go test $(race) $(stripped) -timeout 30m ./...
	go test $(stripped) -run 'TestDriver(Read)?Errors' ./internal/migchange # each call with each code, which takes ten times as long with the detector

test-kubernetes: ## the kubelet's own code, and a real API server; their first builds take 10 to 20 min
	cd test/kubernetes && go vet ./... && go test $(race) -timeout 30m ./kubelet && go test ./api ./dra # kube-apiserver is slow to build with -race

e2e: ## the chart on a real Kubernetes of one node; needs root and runc; PART=storm plays that part alone
	cd test/kubernetes && E2E=required go test -v -count=1 -timeout 60m -ldflags '$(kubernetes)' -run 'TestKubernetes/$(PART)' ./e2e

test-chart: ## the chart with Helm's own code, the image without a container engine, CDI specs by CDI's schema
	cd test/chart && go vet ./... && go test ./...
	cd cmd/image && go vet ./... && go test ./...
	cd test/cdi && go vet ./... && go test ./... # a module of its own, for its dependency

manifest: ## deployments/virgate.yaml, from the chart
	cd test/chart && go test -run '^TestManifest$$' . -update

reference: ## docs: the keys of profiles and the chart's values, from the program
	go test -run '^TestReference$$' ./configs -update
	cd test/chart && go test -run '^TestValuesReference$$' . -update

test-prometheus: ## rules, dashboards and queries, by Debian's package prometheus
	PROMETHEUS=required go test -count=1 ./test/prometheus

image: ## virgate:VERSION, by docker
	docker build --file cmd/image/Dockerfile --build-arg VERSION=$(VERSION) --tag virgate:$(VERSION) .

shell: ## bin/shell, the image's sh
	cd cmd/image && CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o $(CURDIR)/bin/shell ./shell

image-tar: build shell ## bin/virgate-image.tar, without a container engine
	cd cmd/image && go run . -binary $(CURDIR)/bin/virgate -shell $(CURDIR)/bin/shell -output $(CURDIR)/bin/virgate-image.tar -reference virgate:$(VERSION) -version $(VERSION)

licences: ## THIRD_PARTY_LICENSES, after a change of go.mod
	go test -run '^TestLicences$$' ./test/repository -update

sbom: build ## bin/virgate.cdx.json: the modules that are linked into bin/virgate
	cd cmd/image && go run . -binary $(CURDIR)/$(OUTPUT) -bom $(CURDIR)/bin/virgate.cdx.json -version $(VERSION)

gpu-bundle: ## bin/gpu: all that test-gpu needs on a machine with a GPU and no Go
	test/gpu/bundle.sh bin/gpu $(VERSION)

test-gpu: gpu-bundle ## this machine's GPUs, read-only: docs/hardware.md
	bin/gpu/run.sh

fuzz: ## every fuzz test of every package for FUZZTIME (10s)
	@set -e; for package in $$(go list ./...); do listed=$$(go test -list '^Fuzz' $$package); \
	  for name in $$(echo "$$listed" | grep '^Fuzz'); do echo "$$package $$name"; \
	    go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) $$package; done; done

soak: ## the whole program in a storm: SEED=1 OPERATIONS=10000; docs/reliability.md
	SEED=$(SEED) OPERATIONS=$(OPERATIONS) go test -count=1 -timeout 24h -run '^TestSoak$$' -v ./test/soak

vulnerabilities: ## govulncheck, which asks vuln.go.dev
	go run golang.org/x/vuln/cmd/govulncheck@v1.1.4 ./...

lint: $(LINT) ## gofmt, vet without cgo, golangci-lint
	@unformatted=$$(gofmt -s -l */) || exit; [ -z "$$unformatted" ] || { echo "gofmt -s would change:" $$unformatted >&2; exit 1; }
	CGO_ENABLED=0 go vet ./... && $(LINT) run ./...

$(LINT):
	@echo 'building golangci-lint $(LINT_VERSION) once, for a few minutes'
	CGO_ENABLED=0 GOBIN=$(@D) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)

bench: build ## how fast and how large the program is, then all benchmarks
	go run ./test/speed -binary $(OUTPUT)
	go run ./test/speed -check ratios -binary $(OUTPUT)
	go test -run '^$$' -bench . -benchmem ./...

bench-check: build ## test/speed/budget.txt: counts and sizes that must hold
	go run ./test/speed -check counts -binary $(OUTPUT)
