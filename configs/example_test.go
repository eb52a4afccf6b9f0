package configs_test

import (
	"errors"
	"fmt"

	"github.com/virgate/virgate/configs"
)

func ExampleParse() {
	config, err := configs.Parse("profile.yaml", []byte(`
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
`), configs.Overrides{"flags.migStrategy": {Value: "mixed", Source: "--mig-strategy"}})
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println(config.Profile.TimeSlicing[0].Resource, config.Profile.TimeSlicing[0].Replicas)
	fmt.Println(config.Profile.MIGStrategy)
	// Output:
	// nvidia.com/gpu 4
	// mixed
}

// All problems are reported at once, each with its line.
func ExampleProblems() {
	_, err := configs.Parse("profile.yaml", []byte(`version: v2
sharing:
  timeSlicing:
    resources:
    - {name: nvidia.com/gpu, replica: 4}
`), nil)
	var problems configs.Problems
	if errors.As(err, &problems) {
		for _, problem := range problems {
			fmt.Println(problem.Line, problem.Path)
		}
	}
	fmt.Println(err)
	// Output:
	// 1 version
	// 5 sharing.timeSlicing.resources[0].replica
	// profile.yaml:1: version: expected v1 (got "v2")
	// profile.yaml:5: sharing.timeSlicing.resources[0].replica: unknown key, did you mean replicas?
}

func ExampleParseFile() {
	file, err := configs.ParseFile("configmap.yaml", []byte(`
apiVersion: v1
kind: ConfigMap
metadata: {name: profiles}
data:
  default: ""
  shared: |
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
`), nil)
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println(file.Kind, len(file.Entries))
	config, err := file.Select("shared")
	fmt.Println(config.Profile.TimeSlicing[0].Replicas, err)
	_, err = file.Select("")
	fmt.Println(err)
	// Output:
	// ConfigMap 2
	// 2 <nil>
	// select from configmap.yaml: several keys hold a profile, choose one of default, shared
}

func ExampleConfig_SelectMIG() {
	config, err := configs.Parse("profile.yaml", []byte("mig: {manage: true, config: all-balanced}"), nil)
	if err != nil {
		fmt.Println(err)
	}
	config, err = config.SelectMIG("all-1g.5gb")
	fmt.Println(config.Profile.MIG.Name, err)
	_, err = config.SelectMIG("all-balance")
	fmt.Println(err)
	// Output:
	// all-1g.5gb <nil>
	// MIG layout "all-balance": no layout has this name, did you mean all-balanced?
}
