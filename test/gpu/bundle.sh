#!/usr/bin/env bash
# Builds into a folder what run.sh needs on a machine that has a GPU and a
# driver, but neither Go nor this repository.
set -euo pipefail
bundle=${1:?usage: bundle.sh FOLDER VERSION} version=${2:?}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mkdir -p "$bundle"
export CGO_ENABLED=1
strip='-s -w'
go build -trimpath -buildvcs=false -ldflags "$strip -X main.version=$version" -o "$bundle/virgate" ./cmd/virgate
go test -c -trimpath -ldflags "$strip" -o "$bundle/driver.test" ./internal/nvml/driver
go test -c -trimpath -ldflags "$strip" -o "$bundle/gpu.test" ./test/gpu
go build -trimpath -buildvcs=false -ldflags "$strip" -o "$bundle/cudaclient" ./test/gpu/cudaclient
install test/gpu/run.sh "$bundle/run.sh"
