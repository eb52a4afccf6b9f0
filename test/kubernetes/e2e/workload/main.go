// Command workload runs in the tests' pods, and as their pause container. It prints what its container has
// of the node's GPUs and waits for the signal to end, unless its argument is once. If its GPU is shared by
// MPS, it is a client of the daemon meanwhile. At SIGHUP it tries what a hostile tenant would.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
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
	attacks := make(chan os.Signal, 1)
	signal.Notify(attacks, syscall.SIGHUP)
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
	for {
		select {
		case <-ended:
			return
		case <-attacks:
			attack()
		}
	}
}

// attack prints what the container can reach of the node, of other tenants and of GPUs, and then
// "attacked".
func attack() {
	_ = filepath.WalkDir("/", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil // A hostile tenant goes on.
		case path == "/proc", path == "/sys":
			return fs.SkipDir
		case entry.Type()&fs.ModeSocket != 0:
			connection, err := net.Dial("unix", path)
			if err == nil {
				_ = connection.Close()
			}
			fmt.Println("reaches socket", path, err)
		case strings.HasPrefix(path, "/dev/"), strings.Contains(path, "GPU-"), strings.Contains(path, "mps"):
			fmt.Println("reaches", path)
		}
		return nil
	})
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		fmt.Println(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 3 && strings.HasPrefix(fields[3], "rw") {
			fmt.Println("reaches writable mount", fields[1])
		}
	}
	for gpu := range 2 { // NVIDIA's character devices have major number 195.
		path := fmt.Sprintf("/tmp-gpu%d", gpu)
		err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 195<<8|gpu)
		if err == nil {
			var file *os.File
			if file, err = os.Open(path); err == nil {
				_ = file.Close()
			}
			_ = os.Remove(path)
		}
		if !errors.Is(err, fs.ErrPermission) {
			fmt.Printf("reaches device 195:%d: %v\n", gpu, err)
		}
	}
	fmt.Println("attacked")
}
