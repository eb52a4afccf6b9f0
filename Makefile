# `make` lists the targets. Go is all that is needed; lint builds its own tool.
LINT_VERSION := v2.15.0
GOTESTSUM_VERSION := v1.13.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.1.4
# Tools stay for the next clone. A tool built by an older Go may refuse newer code, so each
# path names both versions.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/virgate
LINT = $(TOOLS)/golangci-lint-$(LINT_VERSION)-$(shell go env GOVERSION)/golangci-lint
GOTESTSUM = $(TOOLS)/gotestsum-$(GOTESTSUM_VERSION)-$(shell go env GOVERSION)/gotestsum
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
OUTPUT ?= bin/virgate
PLUGIN ?= bin/kubectl-virgate
IMAGE = virgate:$(shell sed -n 's/^appVersion: //p' charts/virgate/Chart.yaml)# which the chart asks for by default
FUZZTIME ?= 10s
SEED ?= 1
OPERATIONS ?= 10000
PACKAGES ?= ./...
SUITES ?= kubelet api dra # of test/kubernetes
RACE ?= auto
kubernetes = $(addprefix -X k8s.io/component-base/version.git,Version=v1.36.3 Major=1 Minor=36) # which its modules do not know
stripped = -ldflags "-s -w" # the tables for debuggers take nearly half of the time to link tests
race = $(shell go build -race runtime/cgo 2>/dev/null && echo -race)
# The detector finds nothing in packages that start no goroutine, and sees nothing of tests
# that start the program as a process: they run without it, once. Test/scenario's program and the
# floods of test/hostile have it in the nightly run only, because it makes them three to five times as slow.
pure = ./mig/... ./sharing/... ./configs/... ./internal/dra/... ./internal/features/...
processes = $(addprefix ./test/,gpu mps page program prometheus repository speed) $(if $(filter 1,$(LONG)),,./test/scenario ./test/hostile)
# These wait longest, so they begin first.
first = $(addprefix ./,internal/agent test/scenario test/page plugin test/hostile)
chosen = $(shell go list $(PACKAGES))
undetected = $(filter $(shell go list $(pure) $(processes)),$(chosen))
detected = $(filter-out $(undetected),$(chosen))
# gotest is go test. Where TIMES names a folder, as in CI, each run keeps its tests' times there.
gotest = $(if $(TIMES),$(GOTESTSUM) --format standard-quiet --hide-summary skipped --jsonfile-timing-events "$$(mktemp $(TIMES)/XXXXXX)" --,go test)
flags = -vet=off -p 4 -parallel 6 # lint vets; many tests wait, so more than the processors run at once
# Tables for debuggers take a sixth of the time to compile. What is released has none either.
export GOFLAGS := $(strip $(shell go env GOFLAGS) -gcflags=all=-dwarf=false)
export CGO_CFLAGS := -g -O2 -Wno-deprecated-declarations # go-nvml has all of NVML's header
export CGO_LDFLAGS := -g -O2 -Wl,-z,lazy # it leaves NVML's names to the loader; some compilers say -z now

# Compilers and tests have more memory than time, so they collect garbage less often. The other targets do
# not: bench and test-kubernetes judge how much memory the program needs.
demo test test-race test-chart compile cross e2e-build: export GOGC = 400

.PHONY: help all demo build kubectl-virgate cross test test-race test-kubernetes compile e2e e2e-build nightly tools test-chart manifest reference test-prometheus image image-tar shell licences sbom gpu-bundle test-gpu fuzz vulnerabilities soak lint slowest bench bench-check
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1	/p' Makefile

all: lint cross test test-race test-chart test-kubernetes e2e bench-check ## what CI runs

demo: ## the whole program on a simulated node, in one process
	go run ./cmd/virgate-demo

build: ## bin/virgate, or OUTPUT, stripped and reproducible
	go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o $(OUTPUT) ./cmd/virgate

kubectl-virgate: ## the plugin for kubectl as bin/kubectl-virgate, or PLUGIN, for this machine or GOOS and GOARCH
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)' -o $(PLUGIN) ./cmd/kubectl-virgate

cross: # it compiles for a Mac, with LONG=1 for each system that people run it on; linked it is for releases
	@set -e; for system in $(if $(filter 1,$(LONG)),linux/amd64 linux/arm64 darwin/amd64) darwin/arm64; do \
	  CGO_ENABLED=0 GOOS=$${system%/*} GOARCH=$${system#*/} go list -export ./cmd/kubectl-virgate >/dev/null; done

# CI sets SPLIT: what test-race runs with the detector, test leaves out, and the other way round.
test: $(if $(TIMES),$(GOTESTSUM)) ## all tests but the long ones, in 2 min or so, 4 the first time; needs Go alone
	$(gotest) $(if $(SPLIT),,-short) $(flags) $(stripped) -timeout 30m $(if $(SPLIT),$(undetected),$(first) ./...)

test-race: $(if $(TIMES),$(GOTESTSUM)) ## all tests, floods, leaks and a short soak too, with the race detector where there is a C compiler
	@[ '$(race)' ] || { echo 'race detector off: no C compiler, or CGO_ENABLED=0' >&2; [ '$(RACE)' != required ]; }
	$(if $(detected),$(gotest) $(race) $(flags) $(stripped) -timeout 30m $(detected))
	$(if $(SPLIT),,$(if $(undetected),$(gotest) $(flags) $(stripped) -timeout 30m $(undetected)))
	$(gotest) -vet=off $(stripped) -run 'TestDriver(Read)?Errors|TestKilled' ./internal/migchange # each call with each code and each kill, which takes ten times as long with the detector

test-kubernetes: $(if $(TIMES),$(GOTESTSUM)) ## the kubelet's own code, and a real API server; their first builds take 10 to 20 min
	cd test/kubernetes && go vet ./... $(if $(filter kubelet,$(SUITES)),&& $(gotest) -vet=off $(race) -timeout 30m ./kubelet) \
	  $(if $(filter api dra,$(SUITES)),&& $(gotest) -vet=off $(stripped) -timeout 30m $(addprefix ./,$(filter api dra,$(SUITES)))) # kube-apiserver is slow to build with -race

compile: # what the tests above link
	@go list -export -test $(race) $(detected) >/dev/null
	@go list -export -test $(undetected) ./internal/migchange >/dev/null
	@cd test/kubernetes && go list -export -test $(race) ./kubelet >/dev/null && go list -export -test ./api ./dra >/dev/null && go vet ./...

nightly: ## everything at full length, in hours; PART=plugin, mig, mps, dra, switches, soak, bench, starved or a part of e2e
	@PART='$(PART)' .ci/nightly

e2e: e2e-build ## the chart on a real Kubernetes of one node; needs root and runc; PART=storm plays that part alone, SHARD=1/2 half of them
	cd test/kubernetes/e2e && E2E=required E2E_BUILT=$(CURDIR)/bin/e2e SHARD=$(SHARD) $(if $(TIMES),$(GOTESTSUM) --format standard-verbose \
	  --jsonfile-timing-events "$$(mktemp $(TIMES)/XXXXXX)" --raw-command -- go tool test2json -t -p e2e) \
	  $(CURDIR)/bin/e2e/e2e.test -test.v$(if $(TIMES),=test2json) -test.timeout $(if $(filter 1,$(LONG)),24h,60m) -test.run 'TestKubernetes/$(PART)'

e2e-build: $(if $(TIMES),$(GOTESTSUM)) ## bin/e2e: what e2e runs, for two shards that run at once; E2E_BUILT=1 skips it
ifndef E2E_BUILT
	cd test/kubernetes && go test -c -vet=off -ldflags '-s -w $(kubernetes)' -o $(CURDIR)/bin/e2e/e2e.test ./e2e
	cd test/kubernetes/e2e && VIRGATE_E2E_ROLE=build $(CURDIR)/bin/e2e/e2e.test $(CURDIR)/bin/e2e $(TOOLS)
endif

test-chart: $(if $(TIMES),$(GOTESTSUM)) ## the chart with Helm's own code, CDI specs by CDI's schema, the image without a container engine
	cd test/chart && go vet ./... && $(gotest) -timeout 30m ./...
	cd cmd/image && go vet ./... && $(gotest) -timeout 30m ./...

manifest: ## deployments/virgate.yaml, from the chart
	cd test/chart && go test -run '^(TestDefaults|TestManifest)$$' . -update

reference: ## docs: flags, the keys of profiles and the chart's values, from the program
	go test -run '^TestFlagReference$$' ./cmd/virgate -update
	go test -run '^TestFlagReference$$' ./cmd/kubectl-virgate -update
	go test -run '^TestReference' ./configs -update
	cd test/chart && go test -run '^TestValuesReference$$' . -update
	go generate ./internal/nvml

test-prometheus: ## rules, dashboards and queries, by Debian's package prometheus
	PROMETHEUS=required go test -count=1 ./test/prometheus

image: ## the chart's default image by docker, or IMAGE=registry/virgate:tag
	docker build --file cmd/image/Dockerfile --build-arg VERSION=$(VERSION) --tag $(IMAGE) .

shell: ## bin/shell, the image's sh
	cd cmd/image && CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o $(CURDIR)/bin/shell ./shell

image-tar: build shell ## bin/virgate-image.tar, the same without a container engine
	cd cmd/image && go run . -binary $(CURDIR)/bin/virgate -shell $(CURDIR)/bin/shell -output $(CURDIR)/bin/virgate-image.tar -reference $(IMAGE) -version $(VERSION)

licences: ## THIRD_PARTY_LICENSES, after a change of go.mod
	go test -run '^TestLicences$$' ./test/repository -update

sbom: build ## bin/virgate.cdx.json: the modules that are linked into bin/virgate
	cd cmd/image && go run . -binary $(CURDIR)/$(OUTPUT) -bom $(CURDIR)/bin/virgate.cdx.json -version $(VERSION)

gpu-bundle: ## bin/gpu: all that test-gpu needs on a machine with a GPU and no Go
	test/gpu/bundle.sh bin/gpu $(VERSION)

test-gpu: gpu-bundle ## this machine's GPUs: docs/how-to/check-hardware.md
	bin/gpu/run.sh

fuzz: ## every fuzz test of every package for FUZZTIME (10s)
	@set -e; for package in $$(go list ./...); do listed=$$(go test -list '^Fuzz' $$package); \
	  for name in $$(echo "$$listed" | grep '^Fuzz'); do echo "$$package $$name"; \
	    go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) $$package; done; done

soak: ## the whole program in a storm: SEED=1 OPERATIONS=10000; docs/explanation/reliability.md
	SEED=$(SEED) OPERATIONS=$(OPERATIONS) go test -count=1 -timeout 24h -run '^TestSoak$$' -v ./test/soak

vulnerabilities: ## govulncheck, where its database vuln.go.dev can be reached
	@if go run $(GOVULNCHECK) -version | grep -q '^DB updated: '; then go run $(GOVULNCHECK) ./...; \
	  else echo 'vulnerabilities: not checked, because vuln.go.dev cannot be reached'; fi

lint: $(LINT) ## gofmt, vet without cgo, golangci-lint
	@unformatted=$$(gofmt -s -l */) || exit; [ -z "$$unformatted" ] || { echo "gofmt -s would change:" $$unformatted >&2; exit 1; }
	CGO_ENABLED=0 go vet ./... && $(LINT) run ./...

tools: $(LINT) $(GOTESTSUM) ## the linter and what shows the tests' times, outside the clone

$(LINT):
	@echo 'building golangci-lint $(LINT_VERSION) once, for a few minutes'
	CGO_ENABLED=0 GOBIN=$(@D) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)

$(GOTESTSUM):
	GOBIN=$(@D) go install gotest.tools/gotestsum@$(GOTESTSUM_VERSION)

slowest: $(GOTESTSUM) # of the tests whose times standard input has
	@$(GOTESTSUM) tool slowest --num 30 --threshold 1s

bench: build ## how fast and how large the program is, then all benchmarks
	go run ./test/speed -binary $(OUTPUT)
	go run ./test/speed -check ratios -binary $(OUTPUT)
	go test -run '^$$' -bench . -benchmem ./...

bench-check: build ## test/speed/budget.txt: counts and sizes that must hold
	go run ./test/speed -check counts -binary $(OUTPUT)
