package page

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const (
	// With more than maxLines shares, the lines between them are omitted. Of more holders than maxBars, one
	// more bar shows all the others.
	maxLines, maxBars = 16, 64
	// hues is the number of colours, and hueStep the least difference between two, in degrees.
	hues, hueStep = 24, 360 / 24
	// hueStride leads from a colour to the one that is tried next, far from it. It has no divisor in
	// common with hues, so every colour is tried.
	hueStride = 7
	// letterWidth is the part of a board that a letter of a label takes up. Labels on a board narrower than
	// leastLabelled would be too small to read.
	letterWidth, leastLabelled = 6.5, 200
)

// Colours are the namespaces' hues, in degrees.
type Colours map[string]int

// Of returns the namespace's hue: always the same in these Colours, and almost always in others. As
// long as there are fewer namespaces than hues, each has its own.
func (c Colours) Of(namespace string) int {
	if hue, known := c[namespace]; known {
		return hue
	}
	taken := map[int]bool{}
	for _, hue := range c {
		taken[hue] = true
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(namespace))
	at := int(hash.Sum32() % hues)
	for range hues {
		if !taken[at*hueStep] {
			break
		}
		at = (at + hueStride) % hues
	}
	c[namespace] = at * hueStep
	return c[namespace]
}

// Unit is a GPU or a partition to be drawn.
type Unit struct {
	// Index is the driver's, or another name if that is unknown. Profile is a partition's.
	Index, Model, Profile, Resource string
	// Placement is where a partition lies in its GPU's Slots.
	Placement *mig.Placement
	Slots     int
	// Replicas and Held count shares; Replicas is 0 if it is unknown.
	Replicas, Held int
	Health, Reason string
	Shares         []Share
}

// Share is a container's part of a Unit.
type Share struct {
	Namespace, Pod string
	Devices        int
}

// Board is the drawing of a GPU, Width wide: a box per partition, or one for the whole GPU.
type Board struct {
	Label string
	Width float64
	Boxes []Box
}

// Outer is the width with the edge.
func (b Board) Outer() float64 { return b.Width + 2 }

// Box is a GPU or partition, with lines between its shares and a bar for each holder.
type Box struct {
	X, Width float64
	// Text names it and its use, and Mark is a sign for bad health. Label is short, or empty if there
	// is no room.
	Text, Mark, Label string
	Bars              []Bar
	Lines             []float64
}

// Middle is the middle of the box.
func (b Box) Middle() float64 { return b.X + b.Width/2 }

// Bar is what one container holds.
type Bar struct {
	X, Width float64
	Text     string
	Hue      int
}

// Add draws the unit into the board.
func (b *Board) Add(u Unit, colours Colours) {
	box := Box{Width: b.Width, Mark: Mark(u.Health)}
	if p := u.Placement; p != nil && u.Slots > 0 {
		slot := b.Width / float64(u.Slots)
		box.X, box.Width = float64(p.Start)*slot, float64(p.Size)*slot
	}
	if box.Mark == "" && b.Width >= leastLabelled && float64(len(u.Profile))*letterWidth < box.Width {
		box.Label = u.Profile
	}
	shares := max(u.Replicas, u.Held, 1)
	share := box.Width / float64(shares)
	box.Text = strings.Join(strings.Fields(fmt.Sprintf("GPU %s %s %s: %s, %d of %d held %s %s", u.Index, u.Model,
		u.Profile, cmp.Or(u.Resource, "not offered"), u.Held, shares, u.Health, u.Reason)), " ")
	at := box.X
	for _, h := range shown(u.Shares) {
		width := min(share*float64(h.Devices), box.X+box.Width-at)
		box.Bars = append(box.Bars, Bar{
			X:     at,
			Width: max(0, width),
			Text:  fmt.Sprintf("%s/%s: %d of %d shares of GPU %s", h.Namespace, h.Pod, h.Devices, shares, u.Index),
			Hue:   colours.Of(h.Namespace),
		})
		at += width
	}
	if shares <= maxLines {
		for i := 1; i < shares; i++ {
			box.Lines = append(box.Lines, box.X+float64(i)*share)
		}
	}
	b.Boxes = append(b.Boxes, box)
}

// shown returns the shares that get a bar.
func shown(all []Share) []Share {
	if len(all) <= maxBars {
		return all
	}
	rest := all[maxBars]
	rest.Pod += fmt.Sprintf(" and %d more", len(all)-maxBars-1)
	for _, h := range all[maxBars+1:] {
		rest.Devices += h.Devices
	}
	return append(slices.Clone(all[:maxBars]), rest)
}

// Mark returns a sign for bad health, in Virgate's words or the kubelet's, so that it is not shown by
// colour alone.
func Mark(health string) string {
	switch {
	case strings.EqualFold(health, string(sharing.Unhealthy)):
		return "✕"
	case health == string(sharing.Suspect) || health == string(sharing.Recovering):
		return "!"
	}
	return ""
}
