// Package gpu checks Virgate on a machine with GPUs, against the output of nvidia-smi:
// docs/how-to/check-hardware.md. Its tests are skipped unless $VIRGATE is the path of the program,
// so make test skips them. They change no setting of a GPU and reset nothing. Only TestMPS runs
// programs on a GPU, an idle one.
package gpu
