// Command mpscontrol is internal/simmps as a separate program. Tests without a GPU install it as
// nvidia-cuda-mps-control.
package main

import (
	"context"
	"os"

	"github.com/virgate/virgate/internal/simmps"
)

func main() {
	os.Exit(simmps.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
