package report

import "github.com/virgate/virgate/sharing"

// Reasons of the Events about boards that Virgate cuts.
const (
	// MIGApplied says that a board has come to its layout.
	MIGApplied = "MIGApplied"
	// MIGBlocked says that partitions in use are in the way, and which.
	MIGBlocked = "MIGBlocked"
	// MIGFailed says that the board cannot have the layout, or that the driver
	// refused.
	MIGFailed = "MIGFailed"
	// MIGResetRequired says that another MIG mode waits for a reset, which Virgate
	// never does.
	MIGResetRequired = "MIGResetRequired"
)

// layoutNotices are what is news about boards that are cut. A board that is on
// its way is none. One that was first seen as it should be is none either, since
// nothing has happened to it.
func layoutNotices(last, next []sharing.BoardLayout) []notice {
	before := make(map[string]sharing.BoardLayout, len(last))
	for _, board := range last {
		before[board.GPU] = board
	}
	reasons := map[sharing.LayoutState]string{
		sharing.LayoutBlocked: MIGBlocked, sharing.LayoutFailed: MIGFailed, sharing.LayoutResetRequired: MIGResetRequired,
	}
	var news []notice
	for _, board := range next {
		was, known := before[board.GPU]
		if known && was.State == board.State && was.Reason == board.Reason && was.Wanted == board.Wanted {
			continue
		}
		if reason, waits := reasons[board.State]; waits {
			news = append(news, warning(reason, "GPU %d (%s) does not have layout %s: %s", board.Index, board.GPU, board.Wanted, board.Reason))
		} else if known && board.State == sharing.LayoutApplied {
			news = append(news, normal(MIGApplied, "GPU %d (%s) has layout %s", board.Index, board.GPU, board.Wanted))
		}
	}
	return news
}
