package agent

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html/template"
	"io"
	"net/http"
	"sync"
	"time"
)

//go:embed page.html
var pageText string

//go:embed page.css
var pageStyle string

// page shows a Status to people, as one document that loads nothing and runs
// nothing.
type page struct {
	template *template.Template
	// policy forbids the browser everything but the page's own style, so that
	// nothing which a name might smuggle in could do any harm.
	policy string
}

func newPage() page {
	hash := sha256.Sum256([]byte(pageStyle))
	return page{
		template: template.Must(template.New("page").Funcs(template.FuncMap{
			"bytes": bytesText, "percent": percentText, "since": sinceText, "number": numberText, "share": share,
			"cause": causeText, "breakable": breakable, "positive": positive,
			"style": func() template.CSS { return template.CSS(pageStyle) }, //nolint:gosec // it is this program's own
		}).Parse(pageText)),
		policy: "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) + "'",
	}
}

// write answers with the page.
func (p page) write(w http.ResponseWriter, status Status, now time.Time) {
	var buffer bytes.Buffer
	if err := p.template.Execute(&buffer, newPageView(status, now)); err != nil {
		http.Error(w, "the page cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", p.policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cache-Control", "no-store")
	_, _ = io.WriteString(w, Plain(buffer.String()))
}

// showPage answers with the Status for people.
func (a *agent) showPage() http.HandlerFunc {
	// Parsed when somebody looks, which on most nodes nobody does before the
	// kubelet has its devices.
	p := sync.OnceValue(newPage)
	return func(w http.ResponseWriter, _ *http.Request) { p().write(w, a.status(), time.Now()) }
}
