// Uses fake.c from several threads, and prints how many of the driver's nodes it still has open at the end.

#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device);

enum { THREADS = 8, ROUNDS = 2000 };

static pthread_barrier_t together;

static void *use(void *unused)
{
	void *device;
	(void)unused;
	for (int i = 0; i < ROUNDS; i++) {
		nvmlInit_v2();
		pthread_barrier_wait(&together);
		nvmlDeviceGetHandleByIndex_v2(i % 2, &device);
		nvmlShutdown();
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	pthread_barrier_init(&together, NULL, THREADS);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, use, NULL);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	int open = 0;
	DIR *folder = opendir("/proc/self/fd");
	for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
		char link[PATH_MAX], target[PATH_MAX + 1] = "";
		snprintf(link, sizeof link, "/proc/self/fd/%s", entry->d_name);
		ssize_t length = readlink(link, target, sizeof target - 1);
		open += length > 0 && strstr(target, "/open/nvidia") != NULL;
	}
	printf("%d\n", open);
	return 0;
}
