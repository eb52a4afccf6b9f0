package configs

import (
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// readMIG reads the section mig. shared are the layouts that stand elsewhere
// and can be named too. It returns them behind the section's own.
func readMIG(v value, shared MIGConfigs) (sharing.Repartition, MIGConfigs) {
	f := v.mapping(keysOf("mig")...)
	if len(f.entries) > 0 {
		v.note("Virgate's own: NVIDIA's plugin makes no partitions")
	}
	wanted := sharing.Repartition{WhenBusy: readWhenBusy(f.field("whenBusy"))}
	wanted.Manage, _ = f.field("manage").boolean()
	layouts := append(readLayouts(f.field("configs"), true), shared...)

	config := f.field("config")
	name, ok := config.text()
	if !ok {
		return wanted, layouts
	}
	if !wanted.Manage {
		config.note("has no effect without manage: true")
	}
	blocks, err := layouts.resolve(name)
	if err != nil {
		config.problem(err.Error())
		return wanted, layouts
	}
	wanted.Name, wanted.Blocks = name, blocks
	return wanted, layouts
}

func readWhenBusy(v value) sharing.WhenBusy {
	text, ok := v.text()
	switch when := sharing.WhenBusy(text); {
	case !ok:
	case when == sharing.Wait, when == sharing.Refuse:
		return when
	default:
		v.problem("expected wait or refuse")
	}
	return sharing.Wait
}

// judge says why no board that the block can choose can be cut so; nil when one
// can, or when a filter names a board that is not published, so that only its
// driver knows.
func judge(block sharing.LayoutBlock) error {
	boards := mig.Geometries()
	if len(block.Filters) > 0 {
		boards = nil
	}
	for _, filter := range block.Filters {
		board, known := mig.GeometryOf(uint16(filter.Device >> 16))
		if !known {
			return nil
		}
		boards = append(boards, board)
	}
	for _, c := range block.Layout.Partitions {
		if !anyBoard(boards, mig.Layout{MIG: true, Partitions: []mig.Count{{Profile: c.Profile, Count: 1}}}) {
			return fmt.Errorf("no published board that it chooses has the profile %s", c.Profile)
		}
	}
	if !anyBoard(boards, block.Layout) {
		return errors.New("no published board that it chooses can be cut so")
	}
	return nil
}

func anyBoard(boards []mig.Geometry, layout mig.Layout) bool {
	return slices.ContainsFunc(boards, func(board mig.Geometry) bool {
		_, err := board.Place(layout, nil)
		return err == nil
	})
}
