package migchange

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// recorded has the steps that were made.
type recorded struct {
	Partitioner
	steps []string
}

func (r *recorded) Apply(ctx context.Context, gpu string, step mig.Step) error {
	r.steps = append(r.steps, step.String())
	return r.Partitioner.Apply(ctx, gpu, step)
}

// TestDecidedStepsAreMade checks that a reconciler makes exactly the steps of Decide, in order, whatever is in
// use. virgate mig plan prints them.
func TestDecidedStepsAreMade(t *testing.T) {
	t.Parallel()
	for _, c := range layoutChanges {
		t.Run(c.node+" to "+c.layout, func(t *testing.T) {
			w := newWorld(t, c.node)
			w.use(c.processes, c.pods...)
			var decided []string
			d := Decide(Situation{
				GPU: w.gpu(), State: w.migState(), Wanted: layoutNamed(c.layout),
				Holders: NewHolders([]sharing.Allocation{{Namespace: "default", Pod: "pod", Devices: w.held}}, nil),
			})
			for _, step := range d.Steps {
				decided = append(decided, step.String())
			}
			r := w.program()
			made := &recorded{Partitioner: r.Partitioner}
			r.Partitioner = made
			w.run(r, layoutNamed(c.layout), false, 20)
			if diff := cmp.Diff(decided, made.steps); diff != "" || len(decided) == 0 {
				t.Errorf("steps (-decided +made):\n%s", diff)
			}
			if diff := cmp.Diff(w.layout(), d.Record.After); diff != "" {
				t.Errorf("layout (-made +decided):\n%s", diff)
			}
		})
	}
}

// TestDecide checks the decision in each situation: whether there are steps, what stays offered, and the reason.
func TestDecide(t *testing.T) {
	t.Parallel()
	unknown := NewHolders(nil, errors.New("no socket"))
	const kept, all = "kept", "all"
	for _, test := range []struct {
		name, node, layout string
		adjust             func(*Situation)
		state              nodereport.LayoutState
		// offer is all, kept, or "" for nothing; steps: there are some.
		offer, reason string
		steps         bool
	}{
		{"nothing is wanted", "h100", "", nil, "", all, "", false},
		{"the layout is not for this GPU", "h100", "all-1g.5gb", nil, nodereport.LayoutFailed, all, "no such profile", false},
		{"the driver lists no profiles yet, and the layout has a published one", "h100", "all-1g.10gb", func(s *Situation) { s.State.Geometry.Unlisted = true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"the driver lists no profiles yet", "h100", "all-1g.11gb", func(s *Situation) { s.State.Geometry.Unlisted = true },
			nodereport.LayoutPending, all, "only while MIG mode is on", false},
		{"the driver lists no profiles any more, since a reboot", "h100", "all-1g.11gb", func(s *Situation) { s.State.Geometry.Unlisted, s.KeptInMIG = true, true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"the driver lists no profiles yet of an unknown model", "h100", "all-balanced", unknownModel, nodereport.LayoutPending, all, "only while MIG mode is on", false},
		{"the driver lists no profiles yet, and none is wanted", "h100", "all-enabled", unknownModel, nodereport.LayoutPending, "", "being withdrawn", true},
		{"the driver lists no profiles yet, and MIG is to be off", "h100", "all-disabled", unknownModel, nodereport.LayoutApplied, all, "", false},
		{"has the layout", "h100+all-balanced", "all-balanced", nil, nodereport.LayoutApplied, all, "", false},
		{"is changed", "h100+all-1g.10gb", "all-balanced", nil, nodereport.LayoutPending, kept, "being withdrawn", true},
		{"the mode is changed", "h100", "all-balanced", nil, nodereport.LayoutPending, "", "being withdrawn", true},
		{"a pod has the GPU as a whole", "h100", "all-balanced", func(s *Situation) { hold(s, s.GPU) },
			nodereport.LayoutBlocked, "", "as a whole by default/pod", false},
		{"a process has it", "h100", "all-balanced", func(s *Situation) { s.State.Busy = true }, nodereport.LayoutBlocked, all, "by a process", false},
		{"processes are not seen", "h100", "all-balanced", func(s *Situation) { s.State.ProcessesHidden = true }, nodereport.LayoutBlocked, all, "in use: unknown", false},
		{"processes are not seen, but one is", "h100", "all-balanced", func(s *Situation) { s.State.ProcessesHidden, s.State.Busy = true, true },
			nodereport.LayoutBlocked, all, "by a process", false},
		{"processes are not seen of a GPU that nobody can have", "h100", "all-balanced", func(s *Situation) { s.State.ProcessesHidden, s.KeptInMIG = true, true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"processes of partitions are not seen", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) { s.State.ProcessesHidden = true },
			nodereport.LayoutBlocked, all, "in use: unknown", false},
		{"processes are not seen, and need not be", "h100+all-balanced", "all-balanced", func(s *Situation) { s.State.ProcessesHidden = true },
			nodereport.LayoutApplied, all, "", false},
		{"partitions are made where there are none, whoever is not seen", "h100+all-enabled", "all-balanced", func(s *Situation) { s.State.ProcessesHidden = true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"it is not permitted", "h100", "all-balanced", func(s *Situation) { s.State.NotPermitted = true },
			nodereport.LayoutFailed, all, "mig.manage", false},
		{"it is not permitted, and a pod has the GPU", "h100", "all-balanced", func(s *Situation) {
			s.State.NotPermitted = true
			hold(s, s.GPU)
		}, nodereport.LayoutFailed, all, "mig.manage", false},
		{"it is not permitted, and a pod has all of it", "h100+all-7g.80gb", "all-3g.40gb", func(s *Situation) {
			s.State.NotPermitted = true
			hold(s, first(s))
		}, nodereport.LayoutFailed, all, "mig.manage", false},
		{"it is not permitted, and need not be", "h100+all-balanced", "all-balanced", func(s *Situation) { s.State.NotPermitted = true },
			nodereport.LayoutApplied, all, "", false},
		{"it was permitted, and waits for a reset", "a100-40", "all-balanced", func(s *Situation) { s.State.NotPermitted, s.State.Pending, s.ResetRequired = true, true, true },
			nodereport.LayoutResetRequired, all, "reset", false},
		{"that is refused", "h100", "all-balanced", func(s *Situation) {
			hold(s, s.GPU)
			s.Wanted.WhenBusy = sharing.RefuseWhenBusy
		}, nodereport.LayoutBlocked, all, "as a whole", false},
		{"nobody knows who has it", "h100", "all-balanced", func(s *Situation) { s.Holders = unknown }, nodereport.LayoutBlocked, all, "no socket", false},
		{"the kubelet is awaited", "h100", "all-balanced", func(s *Situation) { s.Holders, s.AwaitKubelet = unknown, true },
			nodereport.LayoutPending, "", "no socket", false},
		{"nobody can have it", "h100", "all-balanced", func(s *Situation) { s.Holders, s.KeptInMIG = unknown, true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"nobody knows who has partitions", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) { s.Holders = unknown },
			nodereport.LayoutBlocked, all, "no socket", false},
		{"a pod is in the way of one", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) { hold(s, first(s)) },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"a pod is in the way, and nothing else is to be done", "h100+all-7g.80gb", "all-3g.40gb", func(s *Situation) { hold(s, first(s)) },
			nodereport.LayoutBlocked, "", "default/pod", false},
		{"a pod in the way is refused", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) {
			hold(s, first(s))
			s.Wanted.WhenBusy = sharing.RefuseWhenBusy
		}, nodereport.LayoutBlocked, all, "default/pod", false},
		{"a claim has the GPU as a whole", "h100", "all-balanced", func(s *Situation) { claim(s, s.GPU, false) },
			nodereport.LayoutBlocked, all, "as a whole by default/pod by the claim c of gpu.nvidia.com", false},
		{"a claim has some GPU", "h100", "all-balanced", func(s *Situation) { claim(s, s.GPU, true) },
			nodereport.LayoutBlocked, all, "which may be of any GPU", false},
		{"a claim has partitions of the GPU", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) { claim(s, s.GPU, false) },
			nodereport.LayoutBlocked, all, "(default/pod by the claim c of gpu.nvidia.com)", false},
		{"a claim has a partition in the way of one", "h100+all-1g.10gb", "all-3g.40gb", func(s *Situation) { claim(s, first(s), false) },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"a claim has nothing that goes", "h100+all-balanced", "all-balanced", func(s *Situation) { claim(s, s.GPU, false) },
			nodereport.LayoutApplied, all, "", false},
		{"devices cannot be withdrawn yet", "h100+all-1g.10gb", "all-balanced", func(s *Situation) { s.Starting = true },
			nodereport.LayoutPending, kept, "waits until", false},
		{"at the start a free GPU is partitioned", "h100", "all-balanced", func(s *Situation) { s.Starting = true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"the wanted mode waits for a reset", "a100-40", "all-balanced", func(s *Situation) { s.State.Pending, s.ResetRequired = true, true },
			nodereport.LayoutResetRequired, all, "reset", false},
		{"a reset was asked for, and the mode is not the pending one", "a100-40", "all-balanced", func(s *Situation) { s.ResetRequired = true },
			nodereport.LayoutResetRequired, all, "reset", false},
		{"the mode was in use and is set again", "a100-40", "all-balanced", func(s *Situation) { s.State.Pending = true },
			nodereport.LayoutPending, "", "being withdrawn", true},
		{"the mode takes a reboot", "a100-40", "all-balanced", func(s *Situation) { s.State.NeedsReboot = true },
			nodereport.LayoutPending, all, "for the next reset", true},
		{"the mode takes a reboot, and partitions go with it", "a100-40+all-1g.5gb", "all-disabled", func(s *Situation) { s.State.NeedsReboot = true },
			nodereport.LayoutPending, all, "for the next reset", true},
		{"a pod has a GPU whose mode takes a reboot", "a100-40", "all-balanced", func(s *Situation) {
			s.State.NeedsReboot = true
			hold(s, s.GPU)
		}, nodereport.LayoutBlocked, all, "as a whole by default/pod", false},
		{"a pod has a partition that goes with a reboot", "a100-40+all-1g.5gb", "all-disabled", func(s *Situation) {
			s.State.NeedsReboot = true
			hold(s, first(s))
		}, nodereport.LayoutBlocked, all, "partitions of the GPU are in use", false},
		{"the mode waits for a reboot", "a100-40", "all-balanced", func(s *Situation) { s.State.NeedsReboot, s.State.Pending = true, true },
			nodereport.LayoutResetRequired, all, "reset", false},
		{"another mode waits for a reset", "a100-40", "all-disabled", func(s *Situation) { s.State.Pending = true },
			nodereport.LayoutPending, all, "for the next reset", true},
		{"it cannot be taken back", "a100-40", "all-disabled", func(s *Situation) {
			s.State.Pending = true
			hold(s, s.GPU)
		}, nodereport.LayoutResetRequired, all, "reset", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, test.node)
			s := Situation{GPU: w.gpu(), State: w.migState(), Wanted: layoutNamed(test.layout)}
			if test.adjust != nil {
				test.adjust(&s)
			}
			d := Decide(s)
			if d.State != test.state || !strings.Contains(d.Reason, test.reason) || (test.reason == "") != (d.Reason == "") {
				t.Errorf("%s (%s), want %s (%s)", d.State, d.Reason, test.state, test.reason)
			}
			offer := kept
			switch {
			case d.Offer == nil:
				offer = all
			case len(d.Offer) == 0:
				offer = ""
			}
			if offer != test.offer {
				t.Errorf("offers %v, want %q", d.Offer, test.offer)
			}
			if steps := len(d.Steps) > 0; steps != test.steps || !steps && (d.Record != nil || len(d.Withdraw) > 0) {
				t.Errorf("%d steps, record %+v, withdraws %v", len(d.Steps), d.Record, d.Withdraw)
			}
			if again := d.Again > 0; again != (d.State == nodereport.LayoutPending || d.State == nodereport.LayoutBlocked || d.State == nodereport.LayoutResetRequired) {
				t.Errorf("%s is looked at again in %s", d.State, d.Again)
			}
		})
	}
}

// unknownModel makes an unknown model of the GPU, whose driver lists no profiles while MIG mode is off.
func unknownModel(s *Situation) { s.State.Geometry = mig.Geometry{Unlisted: true} }

// TestOtherNames checks that a layout with a published name gets the driver's profile of the same number, even if
// the driver lists that profile only while MIG mode is on.
func TestOtherNames(t *testing.T) {
	t.Parallel()
	w := newWorldIn(t, "h100", "late-profiles")
	r := w.program()
	r.Partitioner = nvml.NewPartitioner(otherNames{driver{w.sim, w}}, nil)
	w.run(r, layoutNamed("all-3g.40gb"), false, 20)
	if status := r.Status(); len(status) != 1 || status[0].State != nodereport.LayoutApplied || len(status[0].Instances) != 2 ||
		status[0].Instances[0].Profile != parsed(t, "3g.41gb") {
		t.Errorf("%+v", status)
	}
	writes := w.writes
	w.run(r, layoutNamed("all-3g.40gb"), false, 20)
	if w.writes != writes {
		t.Errorf("the same layout again: %d writes", w.writes-writes)
	}
	w.run(r, layoutNamed("all-1g.12gb"), false, 20)
	if status := r.Status(); status[0].State != nodereport.LayoutFailed || !strings.Contains(status[0].Reason, "it has 1g.11gb, ") || len(status[0].Instances) != 2 {
		t.Errorf("a name of neither: %+v", status)
	}
}

// otherNames has profiles with 1 GB more in their names.
type otherNames struct{ driver }

func (d otherNames) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	info, err := d.driver.DeviceGetGpuInstanceProfileInfo(device, enum)
	if p, unnamed := mig.ParseProfile(info.Name); err == nil && unnamed == nil {
		p.MemoryGB++
		info.Name = p.String()
	}
	return info, err
}

// hold has a pod hold the unit.
func hold(s *Situation, unit string) {
	s.Holders = NewHolders([]sharing.Allocation{{Namespace: "default", Pod: "pod", Devices: []string{unit}}}, nil)
}

// claim lets a pod have the unit by a claim.
func claim(s *Situation, unit string, anyGPU bool) {
	s.Holders = NewHolders([]sharing.Allocation{{
		Namespace: "default", Pod: "pod", Resource: "gpu.nvidia.com", Devices: []string{unit}, Claim: "c", AnyGPU: anyGPU,
	}}, nil)
}

// first is the GPU's first partition.
func first(s *Situation) string { return s.State.Instances[0].Computes[0].UUID }
