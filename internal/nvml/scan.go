package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// Scan opens the library, looks at the node once and closes the library again.
//
// The GPUs are by index. A GPU or partition that cannot be read hides no other:
// it is left out, and the error, which then comes beside the GPUs, says why. A
// node without GPUs has none and no error. When the driver cannot be opened, or
// does not list its GPUs, there are no GPUs and an error; errors.Is finds the
// return code in it.
func Scan(lib Library) (gpus []sharing.GPU, err error) {
	if err := lib.Init(); err != nil {
		return nil, fmt.Errorf("open the driver: %w", err)
	}
	defer func() {
		if closing := lib.Shutdown(); closing != nil {
			err = errors.Join(err, fmt.Errorf("close the driver: %w", closing))
		}
	}()
	boards := newScanner(lib, newActivity(), map[string]bool{})
	defer boards.looking.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := boards.scan(ctx)
	if p.err != nil {
		return nil, p.err
	}
	seen := newLedger()
	seen.enter(p, moment{rules: sharing.DefaultHealthRules()})
	return seen.inventory(), p.problems
}
