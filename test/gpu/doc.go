// Package gpu checks Virgate on a machine with GPUs, against the output of nvidia-smi:
// docs/how-to/check-hardware.md. Its tests are skipped unless $VIRGATE is the path of the program,
// so make test skips them. They only read: they change no clock and no MIG mode, reset nothing, and
// run nothing on a GPU.
package gpu
