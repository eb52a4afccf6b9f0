package imports

import (
	"fmt"
	"slices"
	"strings"
)

// check returns what is wrong with the package at folder importing the given
// paths: one line each, in their order, none when all is well.
func check(folder string, imports []string) []string {
	r, ok := ruleFor(folder)
	if !ok {
		return []string{folder + " has no rule: state its arrows in test/imports and .golangci.yml"}
	}
	var wrong []string
	for _, path := range imports {
		if why := r.refuse(folder, path); why != "" {
			wrong = append(wrong, fmt.Sprintf("%s imports %s: %s", folder, strings.TrimPrefix(path, module+"/"), why))
		}
	}
	return wrong
}

// ruleFor returns the rule of the nearest folder at or above the given one.
func ruleFor(folder string) (rule, bool) {
	var nearest rule
	for _, r := range rules() {
		if within(folder, r.folder) && len(r.folder) > len(nearest.folder) {
			nearest = r
		}
	}
	return nearest, nearest.folder != ""
}

// refuse says why folder, which r covers, must not import path; "" when it may.
func (r rule) refuse(folder, path string) string {
	for _, b := range bans() {
		if within(path, b.path) && !within(folder, b.only) {
			return fmt.Sprintf("only %s does: %s", b.only, b.why)
		}
	}
	if ours, ok := strings.CutPrefix(path, module+"/"); ok {
		target, _ := ruleFor(ours)
		if r.anything || target.folder == r.folder || slices.Contains(r.ours, ours) {
			return ""
		}
		return r.arrow()
	}
	if standard(path) {
		if r.pure && below(path, impure()) {
			return r.folder + " is pure: no I/O, no process, no randomness"
		}
		return ""
	}
	if r.anything || below(path, r.foreign) {
		return ""
	}
	return r.arrow()
}

// arrow is the rule in words.
func (r rule) arrow() string {
	allowed := slices.Concat(r.ours, r.foreign)
	if len(allowed) == 0 {
		allowed = []string{"the standard library"}
	}
	return r.folder + " → " + strings.Join(allowed, ", ") + " only"
}

// standard says that path is in Go's standard library, whose first elements
// have no dot. cgo's "C" counts as one.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

func below(path string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return within(path, p) })
}

// within says that path is prefix or lies below it.
func within(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}
