// A stand-in for the part of CUDA's driver API that test/gpu/cudaclient uses. It connects to a
// daemon of internal/simmps, and has its limits.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int multiprocessors = 108;
static size_t total = 40960UL << 20, available = 40000UL << 20;

int cuInit(unsigned flags) {
	const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
	struct sockaddr_un address = {AF_UNIX};
	char answer[256] = "", shared[256];
	int s = socket(AF_UNIX, SOCK_STREAM, 0), server, limit, percentage;
	(void)flags;
	if (!pipe) return 0;
	snprintf(address.sun_path, sizeof address.sun_path, "%s/control", pipe);
	if (connect(s, (void *)&address, sizeof address)) return 0; // CUDA then works without MPS, too.
	dprintf(s, "client %d %d\n", getpid(), getuid());
	if (read(s, answer, sizeof answer - 1) < 0 || sscanf(answer, "ok %d %d %255s %dM", &server, &percentage, shared, &limit) != 4) return 805;
	multiprocessors = multiprocessors * percentage / 100;
	available = (size_t)(limit - 100) << 20;
	return 0;
}
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags; (void)device; *context = &total; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)device; *value = multiprocessors; return attribute == 16 ? 0 : 1; }
int cuMemGetInfo_v2(size_t *a, size_t *t) { *a = available; *t = total; return 0; }
int cuMemAlloc_v2(unsigned long long *memory, size_t size) { *memory = 1; if (size > available) return 2; available -= size; return 0; }
int cuMemsetD8_v2(unsigned long long memory, unsigned char value, size_t size) { (void)memory; (void)value; (void)size; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxDestroy_v2(void *context) { (void)context; return 0; }
int cuGetErrorName(int result, const char **name) {
	*name = result == 0 ? "CUDA_SUCCESS" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_MPS_CONNECTION_FAILED";
	return 0;
}
