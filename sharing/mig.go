package sharing

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
)

// MIGConfig says which partitions Virgate makes of the node's GPUs. The zero
// MIGConfig makes none and uses what is there.
type MIGConfig struct {
	// Manage allows Virgate to make and destroy partitions and to change MIG modes.
	Manage bool
	// Name is the wanted layout's; empty for none, which leaves every GPU as it is.
	Name string
	// Blocks are the layout; none where Name is built in, see mig.NamedLayout.
	Blocks []LayoutBlock
	// WhenBusy says what happens to a GPU with partitions in use that are in the way.
	WhenBusy WhenBusy
	// Reset says that a GPU that nobody uses is reset where its new MIG mode waits for that.
	Reset bool
	// LeftTo says, for people, which other program makes the layouts that the profile would
	// have Virgate make; empty for none. Manage is false then.
	LeftTo string
}

// WhenBusy is one of the constants below.
type WhenBusy string

const (
	// WaitWhenBusy does what can be done and the rest when the partitions are free.
	WaitWhenBusy WhenBusy = "wait"
	// RefuseWhenBusy leaves the GPU as it is until the whole layout can be had.
	RefuseWhenBusy WhenBusy = "refuse"
)

// LayoutBlock says how the GPUs that it chooses are to be partitioned.
type LayoutBlock struct {
	// Filters are those of which a GPU must pass one; none for any GPU.
	Filters []GPUFilter
	// All chooses every GPU that passes; else Indexes has the driver's indexes
	// of the chosen ones, in the order of the document, and is not empty.
	All     bool
	Indexes []int
	// Layout is what they are to have, smaller profiles first.
	Layout mig.Layout
	// Source is where the block was read.
	Source BlockSource
}

// BlockSource is where a document has a block, for messages; zero for a block of no document.
type BlockSource struct {
	File string
	// Line is that of the block, Lines are those of its Layout.Partitions. They count from 1.
	Line  int
	Lines []int
}

// GoString keeps the source out of the generation of a profile, which says what is wanted.
func (BlockSource) GoString() string { return "" }

// Layout is what is wanted of the GPU. Of several blocks that choose it the last
// counts, as mig-parted applies them in order (mig-parted v0.15,
// pkg/mig/config). wanted is false where nothing is asked of the GPU: without
// Manage or a name, with no block that chooses it, and for a GPU without MIG
// where all GPUs are chosen or MIG is to be off. A block counts on the GPUs that it chooses
// only: what it wants of others may be nothing that these can have.
//
// geometry is how the GPU can be partitioned, the zero one for a GPU without
// MIG. The error says that the GPU cannot have what is asked of it, and names
// the layout, with the line, profile and count, but not the GPU; nothing is wanted then. mig.ErrUnlisted says
// that this is not known yet.
func (r MIGConfig) Layout(gpu GPUID, geometry mig.Geometry) (layout mig.Layout, wanted bool, err error) {
	capable := len(geometry.Profiles) > 0 || geometry.Unlisted
	if !r.Manage || r.Name == "" || r.Blocks == nil && !capable {
		return mig.Layout{}, false, nil
	}
	if r.Blocks == nil {
		layout, err = mig.NamedLayout(r.Name, geometry)
		return layout, err == nil, err
	}
	n := r.blockOf(gpu)
	if n < 0 || !capable && (r.Blocks[n].All || !r.Blocks[n].Layout.MIG) {
		return mig.Layout{}, false, nil
	}
	block := r.Blocks[n]
	at, err := -1, mig.ErrNoMIG
	if capable {
		at, err = geometry.Fits(block.Layout)
	}
	if err != nil {
		return mig.Layout{}, false, fmt.Errorf("MIG layout %q: %s%w", r.Name, block.source(at), err)
	}
	return geometry.Named(block.Layout), true, nil
}

// DividesAll says that the layout divides every one of these GPUs, so that none stays whole.
func (r MIGConfig) DividesAll(gpus []GPU) bool {
	return r.Manage && r.Name != "" && len(gpus) > 0 && !slices.ContainsFunc(gpus, func(gpu GPU) bool {
		if !gpu.MIGCapable || r.Blocks == nil {
			return !gpu.MIGCapable || r.Name == "all-disabled"
		}
		n := r.blockOf(GPUID{gpu.Index, gpu.PCIDevice, gpu.PCISubsystem})
		return n < 0 || !r.Blocks[n].Layout.MIG
	})
}

// blockOf is the index of the block that counts for the GPU, -1 for none.
func (r MIGConfig) blockOf(gpu GPUID) int {
	for n, block := range slices.Backward(r.Blocks) {
		if block.passes(gpu) && (block.All || slices.Contains(block.Indexes, gpu.Index)) {
			return n
		}
	}
	return -1
}

// source says where the block's Partitions of that index stand, or all of them where it is
// negative, as the beginning of a message: "FILE:LINE: 7 × 1g.24gb: ".
func (b LayoutBlock) source(at int) string {
	layout, line := b.Layout, b.Source.Line
	if at >= 0 {
		layout.Partitions = layout.Partitions[at : at+1]
		if at < len(b.Source.Lines) {
			line = b.Source.Lines[at]
		}
	}
	if line == 0 {
		return layout.String() + ": "
	}
	return fmt.Sprintf("%s:%d: %s: ", b.Source.File, line, layout)
}

// Source is where the wanted layout was read, "FILE:LINE"; empty for a built-in one.
func (r MIGConfig) Source() string {
	if len(r.Blocks) == 0 {
		return ""
	}
	return r.Blocks[0].Source.String()
}

// String is "FILE:LINE".
func (s BlockSource) String() string { return fmt.Sprintf("%s:%d", s.File, s.Line) }

// Unmatched warns of indexes of the layout that choose no GPU of the node, and of a layout with
// no block for any. One document serves unlike nodes, so a block with a filter that no GPU passes
// is neither an error nor a warning beside others.
func (r MIGConfig) Unmatched(gpus []GPUID) []string {
	if !r.Manage || len(r.Blocks) == 0 {
		return nil
	}
	var notes warnings
	matched := false
	for _, block := range r.Blocks {
		passed := slices.DeleteFunc(slices.Clone(gpus), func(gpu GPUID) bool { return !block.passes(gpu) })
		if len(passed) == 0 {
			continue
		}
		matched = true
		for _, index := range block.Indexes {
			if !slices.ContainsFunc(passed, func(b GPUID) bool { return b.Index == index }) {
				notes.addf("MIG layout %q: %s: GPU %d is not on this node or does not pass the filter", r.Name,
					block.Source, index)
			}
		}
	}
	if !matched {
		notes.addf("MIG layout %q: %s: no block is for a GPU of this node", r.Name, r.Source())
	}
	return sorted(notes.all)
}

func (b LayoutBlock) passes(gpu GPUID) bool {
	return len(b.Filters) == 0 || slices.ContainsFunc(b.Filters, func(f GPUFilter) bool { return f.Match(gpu) })
}

// MIGState is how a GPU is partitioned now, exactly as its driver lists it.
type MIGState struct {
	GPU GPUID
	// Geometry is how the GPU can be partitioned; the zero one for a GPU without MIG.
	Geometry mig.Geometry
	// Enabled is the MIG mode now, Pending that after the next reset of the GPU.
	Enabled, Pending bool
	// NeedsReboot says that only a reboot of the machine activates another mode, as where a
	// virtual machine has the GPU and cannot reset it.
	NeedsReboot bool
	// NotPermitted says that this program may not change how GPUs are partitioned.
	NotPermitted bool
	// Busy says that processes use a GPU without MIG mode, or that nobody can
	// tell. With MIG mode each compute instance says it for itself.
	Busy bool
	// ProcessesHidden says that the driver does not list processes of other PID namespaces to this
	// program, which is not in the host's, so that what is not busy may be in use.
	ProcessesHidden bool
	// Instances are all GPU instances, by placement, also those without a compute instance.
	Instances []mig.Instance
}

// Layout is how the GPU is partitioned, with the places.
func (s MIGState) Layout() mig.PlacedLayout {
	layout := mig.PlacedLayout{MIG: s.Enabled}
	for _, instance := range s.Instances {
		for _, compute := range instance.Computes {
			layout.Partitions = append(layout.Partitions,
				mig.Partition{Profile: instance.Partition(compute), Placement: instance.Placement})
		}
	}
	return layout
}

// WithBusy is the state with the partitions as busy that are, or of whose UUID busy says so.
func (s MIGState) WithBusy(busy func(uuid string) bool) MIGState {
	s.Instances = slices.Clone(s.Instances)
	for i := range s.Instances {
		computes := slices.Clone(s.Instances[i].Computes)
		for j := range computes {
			computes[j].Busy = computes[j].Busy || busy(computes[j].UUID)
		}
		s.Instances[i].Computes = computes
	}
	return s
}

// GPUID is what a layout chooses a GPU by.
type GPUID struct {
	// Index is the driver's enumeration index.
	Index int
	// Device and Subsystem are PCI IDs, the device's in the upper and the
	// vendor's in the lower 16 bits, as NVML has them (nvmlPciInfo_t).
	Device, Subsystem uint32
}

// GPUFilter chooses GPUs by PCI IDs, as mig-parted's device-filter does:
//
//	filter = "0x" DDDDVVVV [ ":0x" SDEVSVEN ]
type GPUFilter struct {
	Device uint32
	// Subsystem is 0 if any will do.
	Subsystem uint32
}

// String is the filter as mig-parted writes it, digits in upper case.
func (f GPUFilter) String() string {
	if f.Subsystem == 0 {
		return fmt.Sprintf("0x%08X", f.Device)
	}
	return fmt.Sprintf("0x%08X:0x%08X", f.Device, f.Subsystem)
}

// Match says that the GPU passes the filter.
func (f GPUFilter) Match(gpu GPUID) bool {
	return gpu.Device == f.Device && (f.Subsystem == 0 || gpu.Subsystem == f.Subsystem)
}
