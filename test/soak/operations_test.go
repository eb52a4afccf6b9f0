package soak

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/configs"
)

// kind is what an operation does.
type kind string

// What happens in a storm. No operation waits for its effect.
const (
	admit            kind = "admit a pod"
	remove           kind = "delete a pod"
	restartContainer kind = "restart a container"
	resizePod        kind = "resize a pod"

	edit     kind = "edit a profile"
	label    kind = "flip the label"
	migLabel kind = "flip the MIG label"

	lose         kind = "lose a GPU"
	heal         kind = "reset a GPU"
	xid          kind = "XID of a GPU"
	partitionXID kind = "XID of a partition"
	heat         kind = "heat a GPU"
	pull         kind = "pull a GPU"
	plug         kind = "plug a GPU"
	failCall     kind = "driver call fails"
	slowCall     kind = "driver call is slow"

	hangup         kind = "SIGHUP"
	scrape         kind = "HTTP requests"
	restartProgram kind = "restart Virgate"
	killProgram    kind = "kill Virgate"
	succeed        kind = "a successor takes over"

	restartKubelet kind = "restart the kubelet"
	restorePods    kind = "kubelet hears of its pods"
	reboot         kind = "reboot the node"
	wipe           kind = "kubelet finds its directory wiped"
	dropStream     kind = "kubelet drops a stream"
	deleteSockets  kind = "delete sockets"
	slowStream     kind = "kubelet reads slowly"
	refuse         kind = "kubelet refuses registrations"
	silence        kind = "kubelet is silent"
	cut            kind = "cut off the API server"
	mend           kind = "API server is back"
	expire         kind = "API server forgets old versions"
)

// What is checked when all is quiet. Each operation waits for its effect.
const (
	obeyed          kind = "wait for the profile"
	settle          kind = "wait until all is as it should be"
	calmHangup      kind = "calm: SIGHUP changes nothing"
	calmRestart     kind = "calm: a restart changes nothing"
	calmKill        kind = "calm: a kill changes nothing"
	calmBad         kind = "calm: a bad profile changes nothing"
	calmReplicas    kind = "calm: replicas change on the open streams"
	calmXID         kind = "calm: a fault is one unit's"
	calmAdmit       kind = "calm: free devices can be had"
	calmContainers  kind = "calm: containers restart"
	calmDrop        kind = "calm: a lost stream comes back"
	calmDrain       kind = "calm: without pods the layout is reached"
	calmSuccession  kind = "calm: a successor changes nothing"
	calmDeadKubelet kind = "calm: Virgate ends in time without a kubelet"
)

// condition is what is known about a GPU's health.
type condition int

const (
	sound condition = iota
	// faulty is a GPU that must not be handed out.
	faulty
	// doubtful is a GPU whose errors the program may have seen or missed.
	doubtful
)

// operation is one step of a schedule. Its kind decides which fields count.
type operation struct {
	kind kind
	// GPU is an ordinal.
	gpu int
	// name is that of a document, a layout, a pod, a resource or a driver call.
	name string
	// text is a document, or a label's value.
	text string
	// wish is written to a document, or must be in force.
	wish     *wantedProfile
	resource string
	count    int
	delay    time.Duration
	// conditions are those of all GPUs, for checks at rest.
	conditions []condition
	// rejected is true if what labels and documents want is invalid. wish is then the last valid one.
	rejected bool
}

func (o operation) String() string {
	var b strings.Builder
	b.WriteString(string(o.kind))
	switch o.kind {
	case lose, heal, xid, partitionXID, heat, pull, plug, calmXID:
		fmt.Fprintf(&b, " %d", o.gpu)
	}
	for _, part := range []string{o.name, o.resource, o.text} {
		if part != "" {
			fmt.Fprintf(&b, " %q", part)
		}
	}
	if o.count != 0 {
		fmt.Fprintf(&b, " × %d", o.count)
	}
	if o.delay != 0 {
		fmt.Fprintf(&b, " %s", o.delay)
	}
	if o.wish != nil {
		fmt.Fprintf(&b, " %+v", *o.wish)
	}
	return b.String()
}

// scheduler writes a schedule. It knows the node's state after the operations so far, as far as that does
// not depend on the program.
type scheduler struct {
	random *rand.Rand
	// kills decides which restarts are kills.
	kills *rand.Rand
	out   []operation

	edits int
	// documents are by name; nil for an invalid one.
	documents map[string]*wantedProfile
	// selected names the document, layout the MIG label's layout.
	selected, layout string
	// inForce is what must be in force; awaited is true if it was waited for.
	inForce wantedProfile
	awaited bool
	// badDocuments is true if the documents have brought what is rejected, and false if the labels have.
	badDocuments bool

	conditions [gpus]condition
	// pulled are ordinals; the last one comes back first.
	pulled []int

	pods []string
	made int

	// cutOff is how many operations are left until the API server is back; cuts
	// counts since the last settle.
	cutOff, cuts int
	// slow, unheard and silenced must be undone by a settle.
	slow, unheard, silenced bool
	// rough storms break connections; in others no stream may end.
	rough bool
}

// longStorm is the minimum length of a storm in a long schedule.
const longStorm = 60

// schedule returns at least this many operations, the same for the same seed. It begins and ends with a
// settled node.
func schedule(seed uint64, operations int) []operation {
	s := &scheduler{random: rand.New(rand.NewPCG(seed, 1)), kills: rand.New(rand.NewPCG(seed, 2)), documents: map[string]*wantedProfile{}, selected: documentNames[0]}
	for _, name := range documentNames {
		s.write(name, s.anyWish())
	}
	s.out = append(s.out, operation{kind: label, text: s.selected})
	s.obey()
	s.settle()
	// Coming to rest takes the most time, so long schedules have long storms.
	length := min(longStorm, max(1, operations/10))
	for len(s.out) < operations {
		s.rough = s.random.IntN(2) == 1
		for range length + s.random.IntN(length) {
			s.blow()
		}
		s.settle()
		for range 2 {
			s.calm()
		}
	}
	s.add(s.atRest(calmDrain))
	s.pods = nil
	s.settle()
	return s.out
}

func (s *scheduler) add(o operation) { s.out = append(s.out, o) }

// orKill returns restart or kill.
func (s *scheduler) orKill(restart, kill kind) kind {
	return pick(s.kills, restart, kill)
}

// one returns true once in n times on average.
func (s *scheduler) one(n int) bool { return s.random.IntN(n) == 0 }

func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// settle ends all disturbances and waits for everything else.
func (s *scheduler) settle() {
	if s.silenced {
		s.add(operation{kind: silence})
		s.add(operation{kind: restartKubelet})
		s.silenced, s.unheard = false, true
	}
	if s.slow {
		s.add(operation{kind: slowStream})
		s.slow = false
	}
	if s.unheard {
		s.add(operation{kind: restorePods})
		s.unheard = false
	}
	for ordinal, c := range s.conditions {
		if (c == doubtful || s.one(3) && c != sound) && !slices.Contains(s.pulled, ordinal) {
			s.heal(ordinal)
		}
	}
	s.obey()
	s.add(s.atRest(settle))
	s.cuts = 0
}

// atRest returns an operation on a node that is at rest or must come to rest.
func (s *scheduler) atRest(kind kind) operation {
	w := s.inForce
	_, good := s.wanted()
	return operation{kind: kind, wish: &w, conditions: slices.Clone(s.conditions[:]), rejected: !good, name: s.selected}
}

func (s *scheduler) mend() {
	if s.cutOff > 0 {
		s.add(operation{kind: mend})
		s.cutOff = 0
	}
}

func (s *scheduler) heal(ordinal int) {
	s.add(operation{kind: heal, gpu: ordinal})
	s.conditions[ordinal] = sound
}

// The node: GPUs by ordinal, three that can be partitioned and two that cannot.
const (
	cuttable = 3
	gpus     = 5
	nodeYAML = "name: soak\nboards:\n- {model: h100, count: 3}\n- {model: t4, count: 2}\n"
)

// The names of whole GPUs before a share renames them.
const (
	gpuName  = "nvidia.com/gpu"
	h100Name = "nvidia.com/h100"
)

// layouts are the partitions of one H100 with 80 GB under each layout, from
// NVIDIA's MIG user guide, "Supported MIG Profiles", and mig-parted's names.
func layouts() map[string]map[string]int {
	return map[string]map[string]int{
		"all-disabled": {},
		"all-1g.10gb":  {"1g.10gb": 7},
		"all-2g.20gb":  {"2g.20gb": 3},
		"all-3g.40gb":  {"3g.40gb": 2},
		"all-balanced": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
	}
}

// share is a time-slicing entry.
type share struct {
	resource string
	replicas int
	renamed  bool
	policy   string
}

// wantedProfile is the content of a document.
type wantedProfile struct {
	// edit numbers the documents, so that one can see which one was read.
	edit int
	// byModel gives the H100 a name of their own.
	byModel bool
	shares  []share
	// excluded are the ordinals of GPUs that are not offered.
	excluded []int
	// oneOnly is failRequestsGreaterThanOne.
	oneOnly bool
	// layout is the layout of the GPUs; empty to leave them as they are. labelled is true if it comes from
	// the Node's label instead of the document.
	layout   string
	labelled bool
	// own is the document's own layout, which labelled overrides.
	own string
}

// document returns the profile in the form of NVIDIA's device plugin.
func (w wantedProfile) document(uuids []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# edit %d.\nversion: v1\nflags: {migStrategy: mixed}\n", w.edit)
	b.WriteString("health: {recoverAfter: 1s, maxRecoverAfter: 1s}\n")
	if w.byModel {
		fmt.Fprintf(&b, "resources: {gpus: [{pattern: \"*H100*\", name: %s}]}\n", h100Name)
	}
	if len(w.excluded) > 0 {
		b.WriteString("exclude:\n")
		for _, ordinal := range w.excluded {
			fmt.Fprintf(&b, "- %s\n", uuids[ordinal])
		}
	}
	if w.layout != "" {
		fmt.Fprintf(&b, "mig: {manage: true, config: %s}\n", w.layout)
	}
	if len(w.shares) == 0 {
		return b.String()
	}
	fmt.Fprintf(&b, "sharing:\n  timeSlicing:\n    failRequestsGreaterThanOne: %t\n    resources:\n", w.oneOnly)
	for _, s := range w.shares {
		fmt.Fprintf(&b, "    - {name: %s, replicas: %d, policy: %s", s.resource, s.replicas, s.policy)
		if s.renamed {
			fmt.Fprintf(&b, ", rename: %s.shared", s.resource)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// written returns the document as it is in the ConfigMap: without a layout of the Node's label.
func (w wantedProfile) written(uuids []string) string {
	if w.labelled {
		w.layout = w.own
	}
	return w.document(uuids)
}

// sharingMode is how a unit is offered: this many devices of that name, 0 for none. The holder of a unit's
// only device has the unit alone.
type sharingMode struct {
	resource string
	devices  int
}

func (w sharingMode) shared() bool { return w.devices > 1 }

// whole returns how a whole GPU is offered.
func (w wantedProfile) whole(ordinal int) sharingMode {
	name := gpuName
	if w.byModel && ordinal < cuttable {
		name = h100Name
	}
	return w.offer(ordinal, name)
}

// partition returns how a partition of the GPU is offered.
func (w wantedProfile) partition(ordinal int, profile string) sharingMode {
	return w.offer(ordinal, "nvidia.com/mig-"+profile)
}

func (w wantedProfile) offer(ordinal int, name string) sharingMode {
	if slices.Contains(w.excluded, ordinal) {
		return sharingMode{}
	}
	for _, s := range w.shares {
		if s.resource != name {
			continue
		}
		if s.renamed {
			name += ".shared"
		}
		return sharingMode{name, s.replicas}
	}
	return sharingMode{name, 1}
}

// names returns the resources that the profile can lead to, sorted.
func (w wantedProfile) names() []string {
	var names []string
	add := func(way sharingMode) {
		if way.devices > 0 && !slices.Contains(names, way.resource) {
			names = append(names, way.resource)
		}
	}
	for ordinal := range gpus {
		add(w.whole(ordinal))
		if ordinal < cuttable {
			for profile := range layouts()[w.layout] {
				add(w.partition(ordinal, profile))
			}
		}
	}
	slices.Sort(names)
	return names
}

// seenPolicy remembers what the program has read of its profile; it reads the profile whenever it plans.
type seenPolicy struct {
	mu sync.Mutex
	// edit and layout are those of the last valid profile.
	edit   int
	layout string
	err    error
	looks  int
}

var editLine = regexp.MustCompile(`(?m)^# edit (\d+)\.$`)

// see records what the program reads.
func (s *seenPolicy) see(selected configs.SelectedProfile, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks++
	s.err = err
	if err == nil {
		if written := editLine.FindStringSubmatch(selected.Documents[selected.Name]); written != nil {
			s.edit, _ = strconv.Atoi(written[1])
		}
		s.layout = selected.Layout
	}
}

// look returns what was last seen, and how often the program has read.
func (s *seenPolicy) look() (edit int, layout string, looks int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.edit, s.layout, s.looks, s.err
}

// missing returns how the last thing seen differs from the wish; empty if it does not.
func (s *seenPolicy) missing(want wantedProfile) string {
	edit, layout, _, err := s.look()
	label := ""
	if want.labelled {
		label = want.layout
	}
	switch {
	case err != nil:
		return fmt.Sprintf("profile: %v, want edit %d", err, want.edit)
	case edit != want.edit:
		return fmt.Sprintf("profile: edit %d seen, want %d", edit, want.edit)
	case layout != label:
		return fmt.Sprintf("profile: MIG label %q seen, want %q", layout, label)
	}
	return ""
}

// awaited returns why the operation must keep waiting; empty if it need not.
func (s *seenPolicy) awaited(o operation) string {
	if !o.rejected {
		return s.missing(*o.wish)
	}
	if _, _, _, err := s.look(); err == nil || errors.Is(err, configs.ErrPending) {
		return "the profile is not rejected"
	}
	return ""
}
