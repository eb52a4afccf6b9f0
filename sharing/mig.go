package sharing

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
)

// MIGConfig is which partitions Virgate makes of the node's GPUs. The zero MIGConfig makes none and
// uses the existing ones.
type MIGConfig struct {
	// Manage allows Virgate to create and destroy partitions and to change MIG modes.
	Manage bool
	// Name is the name of the wanted layout; empty for none, which leaves every GPU as it is.
	Name string
	// Blocks are the layout; none if Name is built in, see mig.NamedLayout.
	Blocks []LayoutBlock
	// WhenBusy is what happens to a GPU if partitions in use are in the way.
	WhenBusy WhenBusy
	// Reset allows Virgate to reset an unused GPU whose new MIG mode waits for a reset.
	Reset bool
	// LeftTo names, for people, the other program that makes the layouts which the profile asks
	// Virgate to make; empty for none. If it is set, Manage is false.
	LeftTo string
}

// WhenBusy is one of the constants below.
type WhenBusy string

const (
	// WaitWhenBusy does now what can be done, and the rest when the partitions are free.
	WaitWhenBusy WhenBusy = "wait"
	// RefuseWhenBusy leaves the GPU as it is until the whole layout is possible.
	RefuseWhenBusy WhenBusy = "refuse"
)

// LayoutBlock is how to partition the GPUs that it chooses.
type LayoutBlock struct {
	// Filters limit the choice to GPUs that pass one of them; none for any GPU.
	Filters []GPUFilter
	// All chooses every GPU that passes Filters. Otherwise Indexes are the driver's indexes of the
	// chosen GPUs, in the order of the document, and not empty.
	All     bool
	Indexes []int
	// Layout is the wanted layout of the chosen GPUs, smaller profiles first.
	Layout mig.Layout
	// Source is where the block was read.
	Source BlockSource
}

// BlockSource is the position of a block in a document, for messages; zero for a block from no
// document.
type BlockSource struct {
	File string
	// Line is the line of the block, Lines are the lines of its Layout.Partitions. They count from
	// 1.
	Line  int
	Lines []int
}

// GoString keeps the source out of the generation of a profile, which depends only on the wanted
// layout.
func (BlockSource) GoString() string { return "" }

// Layout returns the layout that the profile wants for the GPU. If several blocks choose the GPU,
// the last one counts, because mig-parted applies them in order (mig-parted v0.15, pkg/mig/config).
// A block is checked only against the GPUs that it chooses, as other GPUs may be unable to have its
// layout.
//
// wanted is false if the profile asks nothing of the GPU: Manage is false, there is no name, or no
// block chooses the GPU. For a GPU without MIG it is also false if the layout is built in, or if
// the block chooses all GPUs or turns MIG off.
//
// geometry is how the GPU can be partitioned; zero for a GPU without MIG. If the GPU cannot have
// the layout, wanted is false and the error names the layout with line, profile and count, but not
// the GPU. With mig.ErrUnlisted, it is not known yet whether the GPU can have the layout.
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

// DividesAll reports whether the layout divides every one of these GPUs, so that no whole GPU
// remains.
func (r MIGConfig) DividesAll(gpus []GPU) bool {
	return r.Manage && r.Name != "" && len(gpus) > 0 && !slices.ContainsFunc(gpus, func(gpu GPU) bool {
		if !gpu.MIGCapable || r.Blocks == nil {
			return !gpu.MIGCapable || r.Name == "all-disabled"
		}
		n := r.blockOf(GPUID{gpu.Index, gpu.PCIDevice, gpu.PCISubsystem})
		return n < 0 || !r.Blocks[n].Layout.MIG
	})
}

// blockOf returns the index of the block that counts for the GPU; -1 for none.
func (r MIGConfig) blockOf(gpu GPUID) int {
	for n, block := range slices.Backward(r.Blocks) {
		if block.passes(gpu) && (block.All || slices.Contains(block.Indexes, gpu.Index)) {
			return n
		}
	}
	return -1
}

// source returns the position of Partitions[at], or of the whole block if at is negative, as the
// beginning of a message: "FILE:LINE: 7 × 1g.24gb: ".
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

// Source returns where the wanted layout was read, as "FILE:LINE"; empty for a built-in layout.
func (r MIGConfig) Source() string {
	if len(r.Blocks) == 0 {
		return ""
	}
	return r.Blocks[0].Source.String()
}

// String returns "FILE:LINE".
func (s BlockSource) String() string { return fmt.Sprintf("%s:%d", s.File, s.Line) }

// Unmatched returns warnings about indexes that choose no GPU of the node, and about a layout
// without a block for any of its GPUs. One document serves different kinds of nodes, so a block
// whose filter no GPU passes is no error, and there is no warning about it if another block
// matches.
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
	// Geometry is how the GPU can be partitioned; zero for a GPU without MIG.
	Geometry mig.Geometry
	// Enabled is the MIG mode now, Pending the MIG mode after the next reset of the GPU.
	Enabled, Pending bool
	// NeedsReboot is true if only a reboot of the machine activates another mode, for example in a
	// virtual machine that cannot reset the GPU.
	NeedsReboot bool
	// NotPermitted is true if this program may not change how GPUs are partitioned.
	NotPermitted bool
	// Busy is true if processes use a GPU without MIG mode, or if that is unknown. With MIG mode,
	// each compute instance has its own Busy.
	Busy bool
	// ProcessesHidden is true if this program does not run in the host's PID namespace, so the
	// driver hides processes of other PID namespaces from it. A GPU or partition may then be in use
	// although it is not Busy.
	ProcessesHidden bool
	// Instances are all GPU instances, sorted by placement, including those without a compute
	// instance.
	Instances []mig.Instance
}

// Layout returns how the GPU is partitioned, with placements.
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

// WithBusy returns the state with further partitions marked busy: those for whose UUID busy returns
// true.
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

// GPUID identifies a GPU for the choice of a layout.
type GPUID struct {
	// Index is the driver's enumeration index.
	Index int
	// Device and Subsystem are PCI IDs as in NVML's nvmlPciInfo_t: the device's ID in the upper 16
	// bits, the vendor's in the lower.
	Device, Subsystem uint32
}

// GPUFilter chooses GPUs by PCI IDs, as mig-parted's device-filter does:
//
//	filter = "0x" DDDDVVVV [ ":0x" SDEVSVEN ]
type GPUFilter struct {
	Device uint32
	// Subsystem is 0 if any subsystem passes.
	Subsystem uint32
}

// String returns the filter as mig-parted writes it, with digits in upper case.
func (f GPUFilter) String() string {
	if f.Subsystem == 0 {
		return fmt.Sprintf("0x%08X", f.Device)
	}
	return fmt.Sprintf("0x%08X:0x%08X", f.Device, f.Subsystem)
}

// Match reports whether the GPU passes the filter.
func (f GPUFilter) Match(gpu GPUID) bool {
	return gpu.Device == f.Device && (f.Subsystem == 0 || gpu.Subsystem == f.Subsystem)
}
