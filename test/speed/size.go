package main

import (
	"context"
	"fmt"
	"os"
)

// size measures the file.
func size(_ context.Context, b bench) ([]figure, error) {
	info, err := os.Stat(b.binary)
	if err != nil {
		return nil, fmt.Errorf("measure the program: %w", err)
	}
	return []figure{{"size/binary", megabytes(uint64(info.Size())), "MB"}}, nil
}
