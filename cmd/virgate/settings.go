package main

import (
	"fmt"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
)

// settingFlags are the flags that NVIDIA's device plugin has too, and some
// beside them. Their variables are looked up in overrides and not by the flag
// library, so that an error can say where a value comes from.
func settingFlags() []cli.Flag {
	var flags []cli.Flag
	for _, s := range configs.Settings() {
		usage := s.Usage
		for _, variable := range variables(s) {
			usage += " [$" + variable + "]"
		}
		category := "as in NVIDIA's device plugin (flag over variable over document)"
		if s.Own {
			category = "beside those of NVIDIA's device plugin"
		}
		if s.Kind == configs.KindBool {
			flags = append(flags, &cli.BoolFlag{Name: s.Flag, Aliases: s.Aliases, Usage: usage, Category: category, DefaultText: s.Default})
		} else {
			flags = append(flags, &cli.StringFlag{Name: s.Flag, Aliases: s.Aliases, Usage: usage, Category: category, DefaultText: s.Default})
		}
	}
	return flags
}

// overrides are the settings that flags and variables make, by document path.
func overrides(cmd *cli.Command, environment environment) configs.Overrides {
	overrides := configs.Overrides{}
	for _, s := range slices.Concat(configs.Settings(), configs.Variables()) {
		if s.Flag != "" && cmd.IsSet(s.Flag) {
			overrides[s.Path] = configs.Override{Value: fmt.Sprint(cmd.Value(s.Flag)), Source: "--" + s.Flag}
			continue
		}
		for _, variable := range variables(s) {
			if value, ok := environment(variable); ok && value != "" {
				overrides[s.Path] = configs.Override{Value: value, Source: "$" + variable}
				break
			}
		}
	}
	return overrides
}

func variables(s configs.Setting) []string { return append([]string{s.Env}, s.EnvAliases...) }

// configFlags choose the profile.
func configFlags(environment environment) []cli.Flag {
	file, _ := environment("CONFIG_FILE")
	return []cli.Flag{
		&cli.StringFlag{Name: "config", Aliases: []string{"config-file"}, Value: file, DefaultText: "none: everything exclusive", Usage: "the profile: a document as NVIDIA's device plugin reads it, or a ConfigMap manifest with one [$CONFIG_FILE]"},
		&cli.StringFlag{Name: "config-key", Usage: "which profile, when the ConfigMap manifest has several"},
	}
}
