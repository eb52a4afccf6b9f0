package main

import "path/filepath"

// standsIn are the programs of NVIDIA's image whose place this one takes when
// only the image is replaced, with the command that is meant.
func standsIn() map[string]string {
	return map[string]string{"nvidia-device-plugin": "run", "config-manager": "config-manager"}
}

// byName is the command line with the command that the program's name means.
func byName(args []string) []string {
	if len(args) == 0 {
		return args
	}
	command, is := standsIn()[filepath.Base(args[0])]
	if !is {
		return args
	}
	return append([]string{args[0], command}, args[1:]...)
}
