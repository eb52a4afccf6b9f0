package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestContention(t *testing.T) {
	for _, test := range []struct {
		name string
		busy Figure
		sm   []Figure
		want []Contention
	}{
		{"one hogs a full board", KnownFigure(1), []Figure{KnownFigure(0.75), KnownFigure(0.25)}, []Contention{{"GPU-a", 0.75, true}}},
		{"just full", KnownFigure(ContendedFrom), []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, true}}},
		{"room to spare", KnownFigure(0.89), []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, false}}},
		{"alone", KnownFigure(1), []Figure{KnownFigure(1)}, []Contention{{"GPU-a", 1, false}}},
		{"the other one is idle", KnownFigure(1), []Figure{KnownFigure(1), KnownFigure(0)}, []Contention{{"GPU-a", 1, false}}},
		{"all are idle", KnownFigure(1), []Figure{KnownFigure(0), KnownFigure(0)}, nil},
		{"one is unknown", KnownFigure(1), []Figure{KnownFigure(0.75), {}}, nil},
		{"the board does not tell", Figure{}, []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, false}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var containers []ContainerUse
			for _, sm := range test.sm {
				containers = append(containers, ContainerUse{GPU: "GPU-a", SM: sm})
			}
			if diff := cmp.Diff(test.want, contention([]BoardUse{{GPU: "GPU-a", SM: test.busy}}, containers)); diff != "" {
				t.Errorf("contention (-want +got):\n%s", diff)
			}
		})
	}
}
