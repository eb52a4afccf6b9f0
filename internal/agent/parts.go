package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mpsshare"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// newAgent makes the parts, in the order in which they need each other. None of them knows the
// agent: each gets values, earlier parts and functions, and calls the functions only when it runs.
// So a function may name a part that is made later.
//
// The first six are packages of their own, and act: on the GPUs, on MPS daemons, on pods. The loop
// reads their facts, and they request a new decision when these change. The others report: samples,
// view, web and reports.
func newAgent(options Options) *agent {
	a := &agent{
		begun:       int(time.Now().UnixMilli()),
		Options:     options,
		replan:      make(chan struct{}, 1),
		replanNow:   make(chan chan struct{}),
		reportWake:  make(chan struct{}, 1),
		planEnded:   make(chan struct{}),
		locked:      make(chan struct{}),
		registering: make(chan struct{}),
	}
	a.state.Store(&state{})
	a.progress.Store(&profileProgress{state: nodereport.ProfilePending, since: time.Now()})

	a.mig = newMIG(a)
	a.dra = newPaths(a)
	a.releases = newReleases(a)
	a.gpuSettings = newSettings(a)
	a.mps = newMPS(a)
	a.guard = memoryguard.New(memoryguard.Options{
		Pods:            a.Pods,
		Logger:          a.Logger,
		WarningsChanged: a.requestPlan,
		LimitsChanged:   a.wakeReport,
	})

	a.samples = newSampler(a)
	a.view = newView(a)
	a.web = newWeb(a)
	a.reports = newReports(a)
	return a
}

func newMIG(a *agent) *migchange.Reconciler {
	return migchange.New(migchange.Options{
		Partitioner:  a.Partitioner,
		CloseHandles: a.CloseHandles,
		Clients:      a.Clients,
		PauseClients: a.PauseClients,
		Store:        a.Journal,
		Devices:      migDevices{a.Plugin},
		Inputs:       a.migInputs,
		Holders:      a.Kubelet.Held,
		ByDRA:        func() []string { return a.dra.ByDRA() }, // It is made later.
		Resources:    a.resourcesOf,
		Blocked:      func(gpu string) string { return a.releases.Blocked(gpu) }, // It is made later.
		Plan:         a.planNow,
		Changed:      a.wakeReport,
		Refresh:      a.Refresh,
		Logger:       a.Logger,
	})
}

func newPaths(a *agent) *drapath.Paths {
	return drapath.New(a.DRA, drapath.Deps{
		Plugin:      a.Plugin,
		Held:        a.Kubelet.Held,
		MIG:         a.mig,
		Partitioner: a.Partitioner,
		Inputs:      a.pathInputs,
		Replan:      a.requestPlan,
		Logger:      a.Logger,
	})
}

func newReleases(a *agent) *release.Manager {
	return release.New(release.Options{
		Driver:   a.Releases,
		Devices:  a.Plugin,
		Layouts:  a.mig,
		GPUs:     func() []sharing.GPU { return a.state.Load().gpus },
		Serving:  a.serving.Load,
		Users:    a.usersOf,
		OpenedBy: a.openedBy,
		MIGReset: func() bool {
			profile := a.state.Load().profile
			return profile != nil && profile.Profile.MIG.Reset
		},
		Used: func(ctx context.Context) bool {
			if a.DRA.Claims != nil && len(a.DRA.Claims.View().Claims) > 0 {
				return true
			}
			held, err := a.Kubelet.Held(ctx)
			return err != nil || slices.ContainsFunc(held, sharing.Allocation.OfGPU)
		},
		MPS: func(gpu string) bool {
			mps := a.mps.View() // The manager is made later.
			return a.MPS != nil && !mps.Closed[gpu] ||
				slices.ContainsFunc(sharing.UnitsOf(a.state.Load().gpus, gpu),
					func(unit string) bool { return mps.Busy[unit] })
		},
		Paused: func() (release.Pause, bool) {
			now := a.pauseNow()
			return now.by, now.known
		},
		Plan:    a.planNow,
		Changed: a.wakeReport,
		Logger:  a.Logger,
	})
}

func newSettings(a *agent) *gpusettings.Settings {
	return gpusettings.New(gpusettings.Options{
		Driver: a.DriverSettings,
		Inputs: func() (gpus []sharing.GPU, plan sharing.Plan, known bool) {
			s := a.state.Load()
			return s.gpus, s.plan, s.planned && s.unread == nil
		},
		ByDRA: func() map[string]sharing.Unit { return a.dra.Planned() }, // It is made later.
		Closed: func(gpu string) bool {
			return a.releases.Released()[gpu] || a.mig.Changing(gpu) || a.mps.View().Busy[gpu]
		},
		Blocked:     a.releases.Blocked,
		Users:       a.usersOf,
		Changed:     a.requestPlan,
		Looked:      func() { a.mps.Wake() }, // It is made later.
		UndoTimeout: a.DrainTimeout,
		Logger:      a.Logger,
	})
}

func newMPS(a *agent) *mpsshare.Manager {
	options := mpsshare.Options{
		Daemons: a.MPS,
		Inputs: func() (gpus []sharing.GPU, plan sharing.Plan, planned bool) {
			s := a.state.Load()
			return s.gpus, s.plan, s.planned
		},
		Lists:              a.Plugin.Status,
		ByDRA:              a.dra.Planned,
		Users:              a.usersOf,
		ComputeModePending: a.gpuSettings.ComputeModePending,
		Released:           a.releasedIndexes,
		Resets: func(gpu string) int {
			if a.Resets == nil {
				return 0
			}
			return a.begun + a.Resets(gpu)
		},
		Changed: a.requestPlan,
	}
	if a.DRA.Claims != nil {
		options.Claims = a.DRA.Claims
	}
	return mpsshare.New(options)
}

func newWeb(a *agent) *web.Server {
	options := web.Options{
		HTTP:    a.HTTP,
		Listen:  a.Listen,
		Changed: a.wakeReport,
		Logger:  a.Logger,
		Node: web.Node{
			Status:  a.view.status,
			Unready: a.view.unready,
			Waiting: func() []string {
				p := a.progress.Load()
				return nodereport.Waiting(p.layouts, p.waits)
			},
			Plan: func() (sharing.Plan, bool) {
				s := a.state.Load()
				return s.plan, s.planned
			},
			Forecast: newForecaster(a).forecast,
			Metrics:  a.view.registry,
		},
	}
	if a.ListenWhenServing {
		options.May = a.locked
	}
	return web.New(options)
}

// migInputs returns the GPUs and the wanted layout of the loop's last decision.
func (a *agent) migInputs() (gpus []sharing.GPU, wanted sharing.MIGConfig, err error) {
	s := a.state.Load()
	if s.profile != nil {
		wanted = s.profile.Profile.MIG
	}
	if !s.planned {
		err = errors.New("nothing is planned yet")
	}
	if s.pause.by.Any() {
		return nil, wanted, err
	}
	released := a.releases.Released()
	gpus = slices.DeleteFunc(slices.Clone(s.gpus),
		func(g sharing.GPU) bool { return g.DriverIndex == sharing.NotListed || released[g.UUID] })
	return gpus, wanted, err
}

// resourcesOf returns the resources that the profile in force makes of these GPUs.
func (a *agent) resourcesOf(gpus []sharing.GPU) []sharing.Resource {
	profile := a.state.Load().profile
	if profile == nil {
		return nil
	}
	return sharing.NewPlan(gpus, profile.Profile).Resources
}

// migDevices are the device plugin's units for MIG changes.
type migDevices struct{ *plugin.Manager }

func (d migDevices) SetRefusals(units map[string]string) {
	d.Manager.SetRefusals(plugin.MIGChange, units)
}

// pathInputs returns the inputs that decide which units move to DRA and back.
func (a *agent) pathInputs() drapath.Inputs {
	s := a.state.Load()
	inputs := drapath.Inputs{
		GPUs:    s.gpus,
		Planned: s.planned,
		Paused:  s.pause.by.Any(),
	}
	if s.profile != nil {
		inputs.Profile = &s.profile.Profile
	}
	return inputs
}

// releasedIndexes returns the driver's indexes of the GPUs that are released or being released, by
// UUID; -1 if unknown.
func (a *agent) releasedIndexes() map[string]int {
	indexes := map[string]int{}
	for _, r := range a.releases.List() {
		if r.State != release.Restored {
			indexes[r.GPU] = r.DriverIndex
		}
	}
	for _, gpu := range a.state.Load().gpus {
		if index, released := indexes[gpu.UUID]; !released || index >= 0 {
			continue
		}
		if index, err := strconv.Atoi(cmp.Or(gpu.DriverIndex, strconv.Itoa(gpu.Index))); err == nil {
			indexes[gpu.UUID] = index
		}
	}
	return indexes
}

// openedBy names the programs that keep a GPU open although none should.
func (a *agent) openedBy(ctx context.Context, gpu string) string {
	if users := a.usersOf(ctx, gpu); len(users) > 0 {
		return ": " + strings.Join(users, ", ")
	}
	gpus := a.state.Load().gpus
	i := slices.IndexFunc(gpus, func(g sharing.GPU) bool { return g.UUID == gpu })
	if a.OpenedBy == nil || i < 0 || gpus[i].Minor < 0 {
		return ""
	}
	return ", by a program that is in no list of the driver" + a.OpenedBy(gpus[i].Minor)
}

// usersOf returns the pods, claims and processes that use the GPU, or why they are unknown.
func (a *agent) usersOf(ctx context.Context, gpu string) (users []string) {
	s := a.state.Load()
	units := sharing.UnitsOf(s.gpus, gpu)
	held, err := a.Kubelet.Held(ctx)
	if err != nil {
		return []string{release.HoldersUnknown + ": " + err.Error()}
	}
	users = podsByUnit(s.gpus, held)[gpu]
	holders := sharing.HoldersByUnit(held)
	if slices.ContainsFunc(units, func(unit string) bool {
		return slices.ContainsFunc(holders[unit], func(a sharing.Allocation) bool { return !a.Certain() })
	}) {
		a.Plugin.RefreshHolders(units...) // It may be gone.
		users = append(users, sharing.UnnamedHolder)
	}
	users = append(users, a.dra.Users(s.gpus, gpu, held)...)
	pids, err := a.Processes(ctx, gpu)
	for _, pid := range pids {
		users = append(users, fmt.Sprintf("process %d", pid))
	}
	// After another error, a release may be the way to repair the GPU.
	if len(users) == 0 && errors.Is(err, sharing.ErrReleased) {
		users = a.programsOn(gpu)
	}
	return users
}

// programsOn returns the programs that have the GPU open, while the driver cannot list its processes
// because another GPU is released. Like the driver's list, it leaves out the ones that watch GPUs.
// Without the right to see other programs it returns none: pods and claims alone count then.
func (a *agent) programsOn(gpu string) (users []string) {
	gpus := a.state.Load().gpus
	i := slices.IndexFunc(gpus, func(g sharing.GPU) bool { return g.UUID == gpu })
	if a.Programs == nil || i < 0 || gpus[i].Minor < 0 || a.releases.Blocked(gpu) == "" {
		return nil
	}
	programs, _ := a.Programs(gpus[i].Minor)
	for _, program := range programs {
		watches := slices.ContainsFunc([]string{"nv-hostengine", "dcgm", "nvidia-persiste"}, // The kernel cuts names.
			func(name string) bool { return strings.HasPrefix(program, name) })
		if !watches {
			users = append(users, "the program "+program)
		}
	}
	return users
}
