package mig

// Layout is what one board should be cut into. The zero Layout says that MIG
// mode is off.
type Layout struct {
	// MIG says that MIG mode is on. A board with MIG on and no Partitions runs
	// nothing.
	MIG bool
	// Partitions are the wanted partitions. A profile may be listed more than
	// once, or with a Count of 0; the order means nothing to Place.
	Partitions []Count
}

// Count is a number of partitions of one profile.
type Count struct {
	Profile Profile
	Count   int
}
