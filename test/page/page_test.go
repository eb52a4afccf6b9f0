// Package page looks at the page /status of the running program, and at that of
// kubectl virgate --serve, in a real browser. It needs Debian's package chromium and is skipped where that is not
// installed. CHROMIUM=required, which CI sets, makes that a failure.
package page

import (
	"bytes"
	"context"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/test/program"
)

const patience = program.Patience

func chromium(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CHROMIUM") == "required" {
			t.Fatalf("CHROMIUM=required: %v", err)
		}
		t.Skip("chromium is not installed (Debian: apt-get install chromium)")
	}
	return path
}

// browser opens the page and returns the document as it understood it, and what
// it complained of.
type browser struct {
	t                   *testing.T
	path, address, page string
}

func (b browser) run(arguments ...string) (output, complaints string) {
	b.t.Helper()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, b.path, append([]string{
		// The sandbox needs a user that is not root; only the page of this test is opened.
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
		"--user-data-dir=" + b.t.TempDir(), "--enable-logging=stderr",
	}, append(arguments, "http://"+b.address+b.page)...)...)
	command.Stdout, command.Stderr = &stdout, &stderr
	command.WaitDelay = time.Second // Helpers of the browser may keep the pipes open.
	if err := command.Run(); err != nil {
		b.t.Fatalf("chromium: %v\n%s", err, stderr.String())
	}
	return stdout.String(), stderr.String()
}

// demo starts the program with a simulated node and kubelet, and returns its
// HTTP address when all of its pods run.
func demo(t *testing.T) (address string) {
	t.Helper()
	virgate, err := program.Build(t.TempDir(), "virgate-demo")
	if err != nil {
		t.Fatal(err)
	}
	p, err := program.Start(exec.Command(virgate, "--serve", "--verbose", "--listen", "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Terminate(); err != nil {
			t.Errorf("demo: %v", err)
		}
	})
	if _, err := p.Await(regexp.MustCompile(`(?m)^Serving on`)); err != nil {
		t.Fatalf("%v\n%s", err, p.Output())
	}
	if address, err = p.Address(); err != nil {
		t.Fatal(err)
	}
	return address
}

func TestPage(t *testing.T) {
	b := browser{t, chromium(t), demo(t), "/status"}

	t.Run("read", func(t *testing.T) {
		b.t = t
		end := time.Now().Add(patience)
		var document, complaints string
		for time.Now().Before(end) && !strings.Contains(document, "% compute") { // The first sample comes after seconds.
			document, complaints = b.run("--dump-dom")
		}
		for _, want := range []string{
			"<h1>This node</h1>", `<span class="badge good">ready</span>`, "applied", "nvidia.com/gpu", "GPU 7", "demo/<strong>trainer</strong>", "XID 95", "% compute",
		} {
			if !strings.Contains(document, want) {
				t.Errorf("the document lacks %q", want)
			}
		}
		// A browser says so when the page breaks its own policy.
		if strings.Contains(complaints, "CONSOLE") || strings.Contains(complaints, "Content Security Policy") {
			t.Errorf("the browser complains:\n%s", complaints)
		}
		if t.Failed() {
			t.Log(document)
		}
	})

	for _, look := range []struct{ name, scheme string }{{"light", "1"}, {"dark", "0"}} {
		t.Run(look.name, func(t *testing.T) {
			b.t = t
			// SCREENSHOTS keeps the pictures for a person to look at.
			folder := os.Getenv("SCREENSHOTS")
			if folder == "" {
				folder = t.TempDir()
			}
			picture := filepath.Join(folder, "status-"+look.name+".png")
			b.run("--window-size=1280,1200", "--blink-settings=preferredColorScheme="+look.scheme, "--screenshot="+picture)
			if dark := isDark(t, picture); dark != (look.name == "dark") {
				t.Errorf("dark is %v", dark)
			}
		})
	}
}

// isDark says whether the picture's edge, which has the page's ground, is darker
// than half.
func isDark(t *testing.T, path string) bool {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	picture, err := png.Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	colours := map[uint32]bool{}
	for y := range picture.Bounds().Dy() {
		for x := 0; x < picture.Bounds().Dx(); x += 10 {
			red, _, _, _ := picture.At(x, y).RGBA()
			colours[red] = true
		}
	}
	if len(colours) < 5 {
		t.Errorf("the picture is empty: %d colours", len(colours))
	}
	red, _, _, _ := picture.At(2, 2).RGBA()
	return red < 1<<15
}
