package configs

import (
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Kind is what a document is.
type Kind string

const (
	// KindProfile is a device-plugin document, the empty one included.
	KindProfile Kind = "profile"
	// KindMIGConfigs is a mig-parted document.
	KindMIGConfigs Kind = "mig-configs"
	// KindConfigMap is a Kubernetes ConfigMap.
	KindConfigMap Kind = "ConfigMap"
)

// File is a file of any kind.
type File struct {
	// Name is the file's name as the caller gave it.
	Name string
	// Kind says which of the others has the content.
	Kind      Kind
	Config    Config
	MIG       MIGConfigs
	ConfigMap ConfigMap
}

// ParseFile finds out what the document is and reads it: what has a kind, an
// apiVersion or data is a ConfigMap, what has mig-configs is mig-parted's, the
// rest is a device-plugin document.
//
// The error is of type Problems and has all that is wrong. The File then has
// its Name and Kind only.
func ParseFile(file string, data []byte, overrides Overrides) (File, error) {
	var problems Problems
	source := &source{file: file, problems: &problems}
	result := File{Name: file, Kind: KindProfile}
	if root, ok := source.open(data); ok {
		result.Kind = kindOf(root)
		switch result.Kind {
		case KindConfigMap:
			result.ConfigMap = readConfigMap(root, data, overrides)
		case KindMIGConfigs:
			result.MIG = readMIGConfigs(root)
		default:
			result.Config = readProfile(root, overrides, nil)
		}
	}
	if err := problems.err(); err != nil {
		return File{Name: file, Kind: result.Kind}, err
	}
	return result, nil
}

// kindOf looks at the keys without judging them.
func kindOf(root value) Kind {
	if root.shape() != shapeMapping {
		return KindProfile
	}
	kind := KindProfile
	for i := 0; i < len(root.node.Content); i += 2 {
		if root.node.Content[i].Kind != yaml.ScalarNode {
			continue
		}
		switch root.node.Content[i].Value {
		case "kind", "apiVersion", "data":
			return KindConfigMap
		case migConfigsKey:
			kind = KindMIGConfigs
		}
	}
	return kind
}

// Select returns the device-plugin document to run with. In a ConfigMap it is
// the one under key or, with an empty key, the only one; the error lists the
// keys to choose from. Elsewhere there is nothing to choose and key must be
// empty.
func (f File) Select(key string) (Config, error) {
	switch {
	case f.Kind == KindMIGConfigs:
		return Config{}, fmt.Errorf("select from %s: it is a mig-parted document, which has no profile", f.Name)
	case f.Kind == KindProfile && key != "":
		return Config{}, fmt.Errorf("select %s from %s: it is no ConfigMap and has no keys", quote(key), f.Name)
	case f.Kind == KindProfile:
		return f.Config, nil
	}
	config, err := f.ConfigMap.choose(key)
	if err != nil {
		return Config{}, fmt.Errorf("select from %s: %w", f.Name, err)
	}
	return config, nil
}

func (c ConfigMap) choose(key string) (Config, error) {
	var profiles []ConfigMapEntry
	var keys []string
	for _, e := range c.Entries {
		if e.Kind == KindProfile {
			profiles = append(profiles, e)
			keys = append(keys, e.Key)
		}
		if e.Key == key && key != "" {
			if e.Kind == KindProfile {
				return e.Config, nil
			}
			return Config{}, fmt.Errorf("key %s is a mig-parted document, which has no profile", key)
		}
	}
	switch {
	case len(profiles) == 0:
		return Config{}, errors.New("no key holds a profile")
	case key != "":
		return Config{}, fmt.Errorf("no key %s, there is %s", quote(key), strings.Join(keys, ", "))
	case len(profiles) > 1:
		return Config{}, fmt.Errorf("several keys hold a profile, choose one of %s", strings.Join(keys, ", "))
	}
	return profiles[0].Config, nil
}
