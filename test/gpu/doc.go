// Package gpu checks Virgate on a machine that has GPUs, against what
// nvidia-smi says of them: docs/how-to/check-hardware.md. Without the program's path in
// $VIRGATE, as in make test, its tests are skipped. They only read: no clock, no
// MIG mode, no reset, and no work on a GPU.
package gpu
