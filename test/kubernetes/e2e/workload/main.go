// Command workload runs in the tests' pods, and as their pause container. It prints what it was
// given of the node's GPUs and waits for the signal to end, unless its argument is once. With a GPU
// shared by MPS, it is a client of the daemon meanwhile.
package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/virgate/virgate/internal/simmps"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	environment := os.Environ()
	slices.Sort(environment)
	for _, variable := range environment {
		if strings.Contains(variable, "NVIDIA") || strings.Contains(variable, "CUDA") || strings.Contains(variable, "VIRGATE") {
			fmt.Println("env", variable)
		}
	}
	_ = filepath.WalkDir("/dev", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.Contains(path, "nvidia") && entry.Type()&fs.ModeCharDevice != 0 {
			fmt.Println("device", path)
		}
		return nil
	})
	if pipe := os.Getenv("CUDA_MPS_PIPE_DIRECTORY"); pipe != "" {
		client, err := simmps.Connect(context.Background(), pipe, os.Getpid())
		if err != nil {
			fmt.Println("mps:", err)
		} else {
			defer client.Close()
			fmt.Println("mps: at most", client.Percentage, client.Memory)
		}
		shm, err := os.ReadDir("/dev/shm")
		if err != nil {
			fmt.Println(err)
		}
		for _, entry := range shm {
			unit, _ := os.ReadFile(filepath.Join("/dev/shm", entry.Name()))
			fmt.Println("shm", entry.Name(), "of", string(unit))
		}
	}
	fmt.Println("waiting")
	if len(os.Args) > 1 && os.Args[1] == "once" {
		return
	}
	<-ended
}
