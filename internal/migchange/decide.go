package migchange

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Situation is the input of a decision about one GPU.
type Situation struct {
	// GPU is the GPU's UUID, and State its partitioning.
	GPU   string
	State sharing.MIGState
	// Wanted is the MIG configuration wanted for the node's GPUs.
	Wanted  sharing.MIGConfig
	Holders Holders
	// KeptInMIG is true if Virgate keeps the GPU in MIG mode. No pod can have been given it as a
	// whole then, so that unknown holders are no reason to wait.
	KeptInMIG bool
	// ResetRequired is true if the driver required a reset when the mode was last set.
	ResetRequired bool
	// Starting is true before anything is registered, when no device can be withdrawn.
	Starting bool
	// AwaitKubelet is true if the kubelet could not be read since the start but still has time:
	// most often it has just been started, too.
	AwaitKubelet bool
}

// Decision is what to do about a GPU now.
type Decision struct {
	// State is how far the GPU is, and Reason why it does not have its layout. State is empty if no
	// layout is wanted.
	State  nodereport.LayoutState
	Reason string
	// Layout is the wanted layout. Change is what is done now to get there, and what is in the way.
	Layout mig.Layout
	Change mig.Change
	// Steps are to be made now, in this order; none while Virgate must wait for something. They are
	// the steps of Change, or reverse a change of MIG mode.
	Steps []mig.Step
	// Record is what the journal holds while they are made; nil for steps that change no partition.
	Record *Record
	// Withdraw are the units that no pod may be given any more before the first step.
	Withdraw []string
	// Offer are the units of the GPU that stay offered until then; nil for all. It omits units in
	// the way of the layout, which must not be given to another pod when their holder has ended.
	Offer map[string]bool
	// Doubtful are units whose holder may have ended without the kubelet having noticed.
	Doubtful []string
	// Again is when to check again; 0 means when something changes.
	Again time.Duration
}

// A change of a device list or a holder wakes Run. recheckInterval is for what wakes nothing: a
// process that ends. retryInterval is the wait for a kubelet that has not answered yet, and after a
// check that found the GPU changed. soon is the wait before a GPU that was just changed is checked
// again, for its new status.
const (
	recheckInterval = 2 * time.Second
	retryInterval   = 100 * time.Millisecond
	soon            = time.Millisecond
)

// Decide decides what to do about a GPU. It is pure, and the only place where that is decided: a
// running Virgate makes exactly the steps that virgate mig plan shows.
func Decide(s Situation) Decision {
	layout, wanted, err := s.Wanted.Layout(s.State.GPU, s.State.Geometry)
	switch unlisted := errors.Is(err, mig.ErrUnlisted); {
	case unlisted && s.KeptInMIG:
		// A reboot has reset the mode. The list comes with MIG mode.
		layout = mig.Layout{MIG: true}
	case unlisted:
		return Decision{
			State:  nodereport.LayoutPending,
			Reason: err.Error(),
			Again:  recheckInterval,
		}
	case err != nil:
		return Decision{State: nodereport.LayoutFailed, Reason: err.Error()}
	case !wanted:
		return Decision{}
	}
	change, err := mig.NewChange(s.State.Geometry, s.State.Enabled, s.Holders.mark(s.GPU, s.State).Instances, layout)
	if err != nil {
		return Decision{State: nodereport.LayoutFailed, Reason: err.Error()}
	}
	awaitsReset := s.State.Pending != s.State.Enabled // Or will wait: only a reset or a reboot changes the mode.
	if layout.MIG != s.State.Enabled {
		awaitsReset = s.State.NeedsReboot || s.ResetRequired
	}
	if awaitsReset {
		return s.awaitReset(layout)
	}
	if s.State.NotPermitted && (!change.Empty() || !change.Complete()) {
		return Decision{
			State:  nodereport.LayoutFailed,
			Reason: NotPermitted,
			Layout: layout,
		}
	}
	return s.change(layout, change)
}

// change decides for a GPU that needs no reset: its partitions change, or it has its layout.
func (s Situation) change(layout mig.Layout, change mig.Change) Decision {
	d := Decision{
		Layout:   layout,
		Change:   change,
		Offer:    map[string]bool{},
		Withdraw: slices.Clone(change.Doomed),
		Again:    recheckInterval,
	}
	for _, uuid := range change.Kept {
		d.Offer[uuid] = true
	}
	for _, b := range change.Blocked {
		delete(d.Offer, b.UUID)
	}
	changesMode := change.MIG != s.State.Enabled
	var wholeInUse string
	if changesMode {
		d.Withdraw = append(d.Withdraw, s.GPU)
		wholeInUse = s.wholeInUse()
	}
	d.Reason = cmp.Or(wholeInUse, s.partitionsInUse(change))

	reached := change.Empty() && d.Reason == ""
	possible := wholeInUse == "" && !change.Empty()
	kubeletAwaited := wholeInUse != "" && !s.Holders.known() && s.AwaitKubelet
	inService := d.Reason != "" && s.staysInService(wholeInUse, possible)
	unlisted := s.Starting && len(change.Doomed) > 0
	switch {
	case reached:
		d.State = nodereport.LayoutApplied
		d.Offer = nil
		d.Again = 0
		return d
	case kubeletAwaited:
		// A pod that got the GPU now would delay the layout for as long as it runs.
		d.State, d.Again = nodereport.LayoutPending, retryInterval
	case inService:
		d.State = nodereport.LayoutBlocked
		d.Offer = nil
		d.Doubtful = s.Holders.doubtfulUnits()
	case !possible:
		d.State = nodereport.LayoutBlocked
	case unlisted:
		// Partitions that were never listed need not be withdrawn later.
		d.State, d.Reason = nodereport.LayoutPending, "waits until devices can be withdrawn"
	default:
		d.State, d.Reason = nodereport.LayoutPending, "devices are being withdrawn"
		d.Steps = change.Steps
		d.Record = &Record{
			GPU:    s.GPU,
			Before: s.State.Layout(),
			After:  change.Target(),
		}
		return d
	}
	if !change.Empty() {
		d.Change, d.Withdraw = mig.Change{Blocked: change.Blocked}, nil // It is not made now.
	}
	return d
}

// partitionsInUse returns which partitions in use keep the GPU from its whole layout; "" for none.
func (s Situation) partitionsInUse(change mig.Change) string {
	switch {
	case change.Complete():
		return ""
	case s.State.ProcessesHidden:
		return useUnknown + ": " + s.Holders.explain(s.GPU, change.Blocked)
	}
	return s.Holders.explain(s.GPU, change.Blocked)
}

// staysInService reports whether what is in the way of the layout stays offered meanwhile: because
// the profile wants that, or because its user may never end. A program outside pods may run
// forever, and a DRA driver may give out the GPU again.
func (s Situation) staysInService(wholeInUse string, possible bool) bool {
	switch {
	case s.Wanted.WhenBusy == sharing.RefuseWhenBusy, s.State.ProcessesHidden, s.Holders.claimed[s.GPU]:
		return true
	case !s.Holders.known():
		return !possible
	}
	return wholeInUse != "" && s.Holders.pods[s.GPU] == ""
}

// awaitReset decides for a GPU whose MIG mode changes only with a reset or a reboot. Until then it
// is offered as it is. The mode is requested from the driver without a withdrawal, but not while
// the GPU is in use.
func (s Situation) awaitReset(layout mig.Layout) Decision {
	d := Decision{
		State:  nodereport.LayoutResetRequired,
		Reason: "another MIG mode waits for a reset of the GPU (mig.reset) or a reboot",
		Layout: layout,
		Again:  recheckInterval,
	}
	use := s.wholeInUse()
	if use == "" && anyBusy(s.Holders.mark(s.GPU, s.State)) {
		use = "partitions of the GPU are in use"
	}
	switch {
	case s.State.Pending == layout.MIG || s.ResetRequired && layout.MIG != s.State.Enabled:
	case use == "":
		d.State, d.Reason = nodereport.LayoutPending, "the MIG mode for the next reset is set"
		d.Steps, d.Again = []mig.Step{mig.ModeStep(layout.MIG)}, soon
	case layout.MIG != s.State.Enabled:
		d.State, d.Reason = nodereport.LayoutBlocked, "another MIG mode takes a reboot, and before that "+use
	}
	return d
}

// NotPermitted is the reason if Virgate may not partition GPUs.
const NotPermitted = "Virgate may not partition GPUs, which takes a privileged container: the chart's mig.manage"

// useUnknown is the reason why nothing existing is changed while processes are not visible.
const useUnknown = "in use: unknown, because the driver lists no processes to a container without the host's PID " +
	"namespace (hostPID)"

// wholeInUse returns what keeps the whole GPU from changing its MIG mode; "" for nothing.
func (s Situation) wholeInUse() string {
	pod, held := s.Holders.pods[s.GPU]
	switch {
	case !s.Holders.known() && !s.KeptInMIG:
		return s.Holders.err.Error()
	case held:
		return "the GPU is in use as a whole by " + pod
	case !s.State.Enabled && s.State.Busy:
		return "the GPU is in use as a whole by a process, or its processes cannot be listed"
	case !s.State.Enabled && s.State.ProcessesHidden && !s.KeptInMIG:
		return useUnknown
	}
	return ""
}

// lasting returns the GPU's partitions that neither finishing nor undoing the change affects.
func lasting(state sharing.MIGState, record Record) map[string]bool {
	set := map[string]bool{}
	for _, instance := range state.Instances {
		for _, c := range instance.Computes {
			placed := mig.Partition{Profile: instance.Partition(c), Placement: instance.Placement}
			if slices.Contains(record.Before.Partitions, placed) && slices.Contains(record.After.Partitions, placed) {
				set[c.UUID] = true
			}
		}
	}
	return set
}

func partitionsOf(instances []mig.Instance) map[string]bool {
	set := map[string]bool{}
	for _, instance := range instances {
		for _, c := range instance.Computes {
			set[c.UUID] = true
		}
	}
	return set
}
