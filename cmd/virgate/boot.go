package main

import (
	"log/slog"
	"os"
	"strings"
)

// bootID is what the kernel calls this boot, "" when it does not tell.
func bootID(log *slog.Logger, path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		log.Warn("boot ID not read, a reboot does not clear fatal errors", "error", err)
	}
	return strings.TrimSpace(string(data))
}
