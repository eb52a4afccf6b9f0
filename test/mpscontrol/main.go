// Command mpscontrol is internal/simmps as a program of its own, to be installed as
// nvidia-cuda-mps-control where tests have no GPU.
package main

import (
	"context"
	"os"

	"github.com/virgate/virgate/internal/simmps"
)

func main() {
	os.Exit(simmps.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
