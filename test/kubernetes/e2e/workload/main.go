// Command workload is what the pods of the tests run, and their pause container:
// it prints what it was given of the node's GPUs and waits for the signal to end.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	environment := os.Environ()
	slices.Sort(environment)
	for _, variable := range environment {
		if strings.Contains(variable, "NVIDIA") || strings.Contains(variable, "VIRGATE") {
			fmt.Println("env", variable)
		}
	}
	_ = filepath.WalkDir("/dev", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.Contains(path, "nvidia") && entry.Type()&fs.ModeCharDevice != 0 {
			fmt.Println("device", path)
		}
		return nil
	})
	fmt.Println("waiting")
	<-ended
}
