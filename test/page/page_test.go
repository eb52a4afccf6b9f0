// Package page tests the page /status of the running program, and that of kubectl virgate --serve,
// in a real browser. It needs Debian's package chromium and is skipped if that is not installed. CI
// sets CHROMIUM=required, which makes that a failure.
package page

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"image/png"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/test/await"
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

// atOnce has room for the browsers that run at once. More would take each other's time.
var atOnce = make(chan struct{}, 3)

// browser opens the page and returns the document as it understood it, and its complaints.
type browser struct {
	t                   *testing.T
	path, address, page string
}

func (b browser) run(arguments ...string) (output, complaints string) {
	b.t.Helper()
	atOnce <- struct{}{}
	defer func() { <-atOnce }()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(b.t.Context(), patience)
	defer cancel()
	command := exec.CommandContext(ctx, b.path, append([]string{
		// The sandbox does not work as root; the browser only opens this test's page.
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
		"--disable-extensions", "--disable-background-networking", "--disable-component-update",
		"--user-data-dir=" + b.t.TempDir(), "--enable-logging=stderr",
	}, append(arguments, "http://"+b.address+b.page)...)...)
	command.Stdout, command.Stderr = &stdout, &stderr
	command.WaitDelay = patience // Helpers of the browser keep the pipes open until they end.
	if err := command.Run(); err != nil {
		b.t.Fatalf("chromium: %v\n%s", err, stderr.String())
	}
	return stdout.String(), stderr.String()
}

// narrow is a telephone's width in CSS pixels.
const narrow = 390

// frames shows pages one below the other at a telephone's width, which chromium's own window cannot have.
// look is a function that says something about such a page, or nothing.
const frames = `<!DOCTYPE html><title>frames</title><body style="margin:0">%s<script>
const look = %s;
addEventListener("load", () => {
  const said = [...document.querySelectorAll("iframe")].map(f => [f.getAttribute("src"), look(f.contentDocument)]);
  document.body.dataset.said = said.filter(([, what]) => what).map(s => s.join(" ")).join("\n");
});
</script>`

// cut names elements whose content is cut or must be scrolled, and the page itself if it must be.
const cut = `page => {
  let cut = "";
  for (const e of page.querySelectorAll("html, main, table, td, th, section, article, p, div, header, form"))
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 || e.getBoundingClientRect().right > innerWidth + 1) cut += e.tagName + "." + e.className + " " + e.scrollWidth + " ";
  return cut;
}`

// framed shows the pages in frames. It returns what look says about each, after the page's path; a single
// start of the browser does for all.
func (b browser) framed(look string, pages []string, arguments ...string) (said []string) {
	b.t.Helper()
	target := b.address
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: target})
			r.Out.Host = target
		},
		ModifyResponse: func(r *http.Response) error { // No page of ours may be framed.
			r.Header.Del("Content-Security-Policy")
			return nil
		},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/frames" {
			var each strings.Builder
			for _, page := range pages {
				fmt.Fprintf(&each, `<iframe src="%s" style="border:0;width:%dpx;height:3000px"></iframe>`, html.EscapeString(page), narrow)
			}
			_, _ = fmt.Fprintf(w, frames, each.String(), look)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	defer server.Close()
	b.address, b.page = strings.TrimPrefix(server.URL, "http://"), "/frames"
	document, complaints := b.run(append([]string{"--window-size=500,1600", "--dump-dom"}, arguments...)...)
	match := regexp.MustCompile(`data-said="([^"]*)"`).FindStringSubmatch(document)
	if match == nil {
		b.t.Fatalf("the frames are not read:\n%s\n%s", document, complaints)
	}
	return strings.FieldsFunc(html.UnescapeString(match[1]), func(r rune) bool { return r == '\n' })
}

// checkNarrow checks pages at a telephone's width: everything must be visible without scrolling sideways.
// The keys are the names of the pictures that SCREENSHOTS keeps.
func (b browser) checkNarrow(t *testing.T, pages map[string]string) {
	t.Helper()
	b.t = t
	if said := b.framed(cut, slices.Sorted(maps.Values(pages))); len(said) > 0 {
		t.Errorf("cut at %d pixels: %s", narrow, strings.Join(said, "\n"))
	}
	if folder := os.Getenv("SCREENSHOTS"); folder != "" {
		for name, page := range pages {
			b.framed(cut, []string{page}, "--screenshot="+filepath.Join(folder, name+"-narrow.png"))
		}
	}
}

// TestPicture checks that the README's picture is drawn as an image, which may neither load nor run
// anything.
func TestPicture(t *testing.T) {
	t.Parallel() // Every test here waits for its browser.
	data, err := os.ReadFile("../../docs/status.svg")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status.svg" {
			_, _ = fmt.Fprint(w, `<!DOCTYPE html><title>picture</title><body style="margin:0"><img src="/status.svg">`)
			return
		}
		w.Header().Set("Content-Type", "image/svg+xml")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; sandbox") // As GitHub does.
		_, _ = w.Write(data)
	}))
	t.Cleanup(server.Close)
	b := browser{t, chromium(t), strings.TrimPrefix(server.URL, "http://"), "/"}
	for _, look := range []struct{ name, scheme string }{{"light", "1"}, {"dark", "0"}} {
		picture := filepath.Join(screenshots(t), "picture-"+look.name+".png")
		b.run("--window-size=1240,930", "--blink-settings=preferredColorScheme="+look.scheme, "--screenshot="+picture)
		if dark := isDark(t, picture); dark != (look.name == "dark") {
			t.Errorf("dark is %v", dark)
		}
	}
}

// screenshots is the folder for pictures. SCREENSHOTS keeps them for inspection.
func screenshots(t *testing.T) string {
	if folder := os.Getenv("SCREENSHOTS"); folder != "" {
		return folder
	}
	return t.TempDir()
}

// demo starts the program with a simulated node and kubelet. It returns its HTTP address and that of its
// cluster's page when all of its pods run.
func demo(t *testing.T) (address, cluster string) {
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
	match, err := p.Await(regexp.MustCompile(`(?m)^The page of a whole cluster is at http://(\S+)$`))
	if err != nil {
		t.Fatal(err)
	}
	return address, match[1]
}

func TestPage(t *testing.T) {
	t.Parallel()
	path := chromium(t)
	address, cluster := demo(t)
	b := browser{t, path, address, "/status"}

	t.Run("read", func(t *testing.T) {
		b.t = t
		await.True(t, "the first sample", func() bool {
			response, err := http.Get("http://" + address + "/status")
			if err != nil {
				return false
			}
			defer func() { _ = response.Body.Close() }()
			text, err := io.ReadAll(response.Body)
			return err == nil && strings.Contains(string(text), "% compute")
		})
		document, complaints := b.run("--dump-dom")
		for _, want := range []string{
			"<h1>This node</h1>", `<span class="badge good">ready</span>`, "applied", "nvidia.com/gpu", "GPU 7", "demo/<strong>trainer</strong>", "XID 95", "% compute",
		} {
			if !strings.Contains(document, want) {
				t.Errorf("the document lacks %q", want)
			}
		}
		// A browser complains when the page breaks its own policy.
		if strings.Contains(complaints, "CONSOLE") || strings.Contains(complaints, "Content Security Policy") {
			t.Errorf("the browser complains:\n%s", complaints)
		}
		if t.Failed() {
			t.Log(document)
		}
	})

	t.Run("narrow", func(t *testing.T) { b.checkNarrow(t, map[string]string{"status": "/status"}) })

	t.Run("cluster", func(t *testing.T) {
		address, path, _ := strings.Cut(cluster, "/")
		b := browser{t, b.path, address, "/" + path}
		document, complaints := b.run("--dump-dom")
		for _, want := range []string{`data-name="demo"`, "demo/trainer: 1 of 6 shares of GPU", "</svg> team-a</span>", ">1 of 1 nodes</output>"} {
			if !strings.Contains(document, want) {
				t.Errorf("the document lacks %q:\n%s", want, document)
			}
		}
		b.page += "nodes/demo"
		node, more := b.run("--dump-dom")
		if !strings.Contains(node, "demo/<strong>trainer</strong>") || !strings.Contains(node, "XID 95</a>") {
			t.Errorf("the node's page there:\n%s", node)
		}
		if complaints += more; strings.Contains(complaints, "CONSOLE") || strings.Contains(complaints, "Content Security Policy") {
			t.Errorf("the browser complains:\n%s", complaints)
		}
	})

	for _, look := range []struct{ name, scheme string }{{"light", "1"}, {"dark", "0"}} {
		t.Run(look.name, func(t *testing.T) {
			b.t = t
			picture := filepath.Join(screenshots(t), "status-"+look.name+".png")
			b.run("--window-size=1280,1200", "--blink-settings=preferredColorScheme="+look.scheme, "--screenshot="+picture)
			if dark := isDark(t, picture); dark != (look.name == "dark") {
				t.Errorf("dark is %v", dark)
			}
		})
	}
}

// isDark reports whether the picture's edge, which shows the page's background, is darker than half.
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
