package mig_test

import (
	"fmt"

	"github.com/virgate/virgate/mig"
)

func ExampleParseProfile() {
	profile, err := mig.ParseProfile("1g.5gb+me")
	fmt.Println(profile.Slices, profile.MemoryGB, profile.Attributes, profile.ResourceName(), err)
	_, err = mig.ParseProfile("1g")
	fmt.Println(err)
	// Output:
	// 1 5 +me mig-1g.5gb.me <nil>
	// MIG profile "1g": not of the form of 1g.5gb, 1c.2g.10gb or 1g.5gb+me
}

func ExampleGeometryOf() {
	geometry, known := mig.GeometryOf(0x20B0) // an A100 with 40 GB
	fmt.Println(known, geometry.Slices, "slices,", geometry.Slots, "slots")
	for _, info := range geometry.Profiles {
		fmt.Println(info.Max, "of", info.Profile, "at", info.Starts)
	}
	// Output:
	// true 7 slices, 8 slots
	// 7 of 1g.5gb at [0 1 2 3 4 5 6]
	// 1 of 1g.5gb+me at [0 1 2 3 4 5 6]
	// 4 of 1g.10gb at [0 2 4 6]
	// 3 of 2g.10gb at [0 2 4]
	// 2 of 3g.20gb at [0 4]
	// 1 of 4g.20gb at [0]
	// 1 of 7g.40gb at [0]
}

func ExampleNamedLayout() {
	geometry, _ := mig.GeometryOf(0x20B0)
	layout, err := mig.NamedLayout("all-balanced", geometry)
	if err != nil {
		fmt.Println(err)
	}
	for _, partitions := range layout.Partitions {
		fmt.Println(partitions.Count, "of", partitions.Profile)
	}
	// Output:
	// 2 of 1g.5gb
	// 1 of 2g.10gb
	// 1 of 3g.20gb
}

func ExampleGeometry_Place() {
	geometry, _ := mig.GeometryOf(0x20B0)
	large, _ := mig.ParseProfile("3g.20gb")
	kept := []mig.Partition{{Profile: large, Placement: mig.Placement{Start: 4, Size: 4}}}

	placed, err := geometry.Place(mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: large, Count: 1}}}, kept)
	fmt.Println(placed, err)
	_, err = geometry.Place(mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: large, Count: 2}}}, kept)
	fmt.Println(err)
	// Output:
	// [{3g.20gb 0:4}] <nil>
	// place 3g.20gb beside 3g.20gb, 3g.20gb: no room on the GPU
}

// A GPU with one partition in use and one free one shall have other partitions.
func ExampleNewChange() {
	geometry, _ := mig.GeometryOf(0x20B0)
	small, _ := mig.ParseProfile("1g.5gb")
	large, _ := mig.ParseProfile("3g.20gb")
	have := []mig.Instance{
		{GI: 1, Profile: large, Placement: mig.Placement{Start: 0, Size: 4}, Computes: []mig.Compute{{Slices: 3, UUID: "MIG-free"}}},
		{GI: 2, Profile: large, Placement: mig.Placement{Start: 4, Size: 4}, Computes: []mig.Compute{{Slices: 3, UUID: "MIG-used", Busy: true}}},
	}
	change, err := mig.NewChange(geometry, true, have, mig.Layout{MIG: true, Partitions: []mig.PartitionCount{
		{Profile: large, Count: 1}, {Profile: small, Count: 2},
	}})
	if err != nil {
		fmt.Println(err)
	}
	for _, step := range change.Steps {
		fmt.Println(step)
	}
	fmt.Println("complete:", change.Complete())
	fmt.Print(mig.Draw(geometry.Slots, 73, change.After(have)))
	// Output:
	// destroy partition 3g.20gb at 0:4 (MIG-free)
	// destroy GPU instance 3g.20gb at 0:4
	// create GPU instance 1g.5gb at 2:1
	// create partition 1g.5gb at 2:1
	// create GPU instance 1g.5gb at 3:1
	// create partition 1g.5gb at 3:1
	// complete: true
	// 0        1        2        3        4        5        6        7
	// ┌────────┬────────┬────────┬────────┬───────────────────────────────────┐
	// │·       │·       │1g.5gb  │1g.5gb  │3g.20gb                            │
	// │        │        │new     │new     │in use                             │
	// └────────┴────────┴────────┴────────┴───────────────────────────────────┘
}
