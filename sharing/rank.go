package sharing

import "cmp"

// better says that a device of unit a is to be picked before one of unit b.
func (c *choice) better(a, b int) bool {
	u, v := &c.units[a], &c.units[b]
	load := cmp.Compare(u.used+u.picks, v.used+v.picks)
	picks := cmp.Compare(u.picks, v.picks)

	m, n := c.buckets[a].board, c.buckets[b].board
	boardLoad := cmp.Compare(c.board(a).used+u.boardPicks, c.board(b).used+v.boardPicks)
	boardPicks := cmp.Compare(u.boardPicks, v.boardPicks)

	var rank int
	switch c.policy {
	case Packed:
		// All units of one board come before those of the next.
		boardSick := cmp.Compare(c.boardSick[m], c.boardSick[n])
		rank = cmp.Or(-boardLoad, -boardPicks, boardSick, cmp.Compare(m, n), -load, -picks)
	case Spread:
		rank = cmp.Or(picks, boardPicks, load, boardLoad)
	default:
		rank = cmp.Or(load, picks, boardLoad, boardPicks)
	}
	return cmp.Or(rank, cmp.Compare(c.buckets[a].sick, c.buckets[b].sick), cmp.Compare(a, b)) < 0
}
