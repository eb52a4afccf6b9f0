// Package page has what the page of a node and that of a cluster share: how they look, the script that
// keeps them up to date, and how they are served. It draws values, and reads nothing itself.
//
// Files: server.go sends pages; node.go is a node as its page draws it; board.go draws GPUs.
package page

import (
	"bytes"
	"compress/gzip"
	"embed"
	"html/template"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/status"
)

//go:embed page.css page.js node.html
var files embed.FS

// policy forbids the browser everything except the page's own files, so that a name with markup in it
// does no harm.
const policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'self'; " +
	"script-src 'self'; connect-src 'self'"

// Secured sends the handler's answers with headers that keep a browser from loading anything else, from
// storing them and from showing them to other sites.
func Secured(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy":      policy,
			"X-Content-Type-Options":       "nosniff",
			"Referrer-Policy":              "no-referrer",
			"Cross-Origin-Resource-Policy": "same-origin",
			"Cache-Control":                "no-store",
		} {
			w.Header().Set(name, value)
		}
		handler.ServeHTTP(w, r)
	})
}

// IsLoopback reports whether a host, with or without a port, is localhost or a loopback address. A page
// that requires it of a request's Host cannot be read by a site whose name points to this machine (DNS
// rebinding).
func IsLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Limited answers that many requests at a time, and others with 503.
func Limited(most int, handler http.Handler) http.Handler {
	underWay := make(chan struct{}, most)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case underWay <- struct{}{}:
			defer func() { <-underWay }()
			handler.ServeHTTP(w, r)
		default:
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests at a time", http.StatusServiceUnavailable)
		}
	})
}

// NewServer returns a server that waits for no client for long.
func NewServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
}

// ServeFiles adds the style sheet and the script that the templates name. Pages have them beside
// themselves, or in the folder above.
func ServeFiles(mux *http.ServeMux) {
	ServeFile(mux, files, "page.css", "text/css")
	ServeFile(mux, files, "page.js", "text/javascript")
}

// ServeFile adds one more file, of that type.
func ServeFile(mux *http.ServeMux, folder embed.FS, name, kind string) {
	mux.Handle("GET /"+name, Secured(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := folder.ReadFile(name)
		w.Header().Set("Content-Type", kind+"; charset=utf-8")
		Send(w, r, data)
	})))
}

// SendHTML answers with the parts of a page.
func SendHTML(w http.ResponseWriter, r *http.Request, parts ...[]byte) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	Send(w, r, parts...)
}

// Send writes the parts, compressed if the browser accepts it.
func Send(w http.ResponseWriter, r *http.Request, parts ...[]byte) {
	w.Header().Set("Vary", "Accept-Encoding")
	var out io.Writer = w
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		defer func() { _ = packed.Close() }()
		out = packed
	}
	for _, part := range parts {
		if _, err := out.Write(part); err != nil {
			return
		}
	}
}

// Templates are the templates of a page.
type Templates struct{ all *template.Template }

// NewTemplates returns the shared templates with those of the text, which may use them.
func NewTemplates(text string) Templates {
	shared, _ := files.ReadFile("node.html")
	all := template.Must(template.New("").Funcs(functions()).Parse(string(shared)))
	return Templates{template.Must(all.Parse(text))}
}

// Draw executes a template, and removes characters that a browser would interpret instead of show.
func (t Templates) Draw(name string, data any) []byte {
	var buffer bytes.Buffer
	if err := t.all.ExecuteTemplate(&buffer, name, data); err != nil {
		return []byte("the page cannot be made: " + template.HTMLEscapeString(err.Error()))
	}
	return []byte(status.Plain(buffer.String()))
}
