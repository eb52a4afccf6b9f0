// An nvidia-modprobe for tests: for each -f FILE, the driver's file of a capability, it makes the
// capability's device node in the /dev that it sees.

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

static int major_number(void)
{
	char line[256], name[256];
	int major;
	FILE *file = fopen("/proc/devices", "r");
	while (file != NULL && fgets(line, sizeof line, file) != NULL)
		if (sscanf(line, "%d %255s", &major, name) == 2 && strcmp(name, "nvidia-caps") == 0) return major;
	fprintf(stderr, "nvidia-modprobe: no nvidia-caps in /proc/devices\n");
	return -1;
}

int main(int count, char **arguments)
{
	for (int i = 1; i + 1 < count && strcmp(arguments[i], "-f") == 0; i += 2) {
		int minor, mode, major = major_number();
		FILE *file = fopen(arguments[i + 1], "r");
		if (major < 0 || file == NULL || fscanf(file, "DeviceFileMinor: %d DeviceFileMode: %d", &minor, &mode) != 2) {
			fprintf(stderr, "nvidia-modprobe: cannot read %s\n", arguments[i + 1]);
			return 1;
		}
		fclose(file);
		char node[64];
		snprintf(node, sizeof node, "/dev/nvidia-caps/nvidia-cap%d", minor);
		mkdir("/dev/nvidia-caps", 0755);
		if (mknod(node, S_IFCHR | mode, makedev(major, minor)) != 0 && errno != EEXIST) {
			perror(node);
			return 1;
		}
	}
	return 0;
}
